"""Models as people write them, from start to end: what is found in them without naming places.

Of each is known what `slots="auto"` takes, or why nothing is taken.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tests.kasmina import zoo_of_images as images
from tests.kasmina import zoo_of_numbers as numbers
from tests.kasmina import zoo_of_sequences as sequences
from tests.kasmina.zoo import Entry

_DRAW = torch.Generator().manual_seed(1)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_DRAW)


def words(*shape: int) -> Tensor:
    return torch.randint(2, sequences.WORDS, shape, generator=_DRAW)


@dataclass(frozen=True)
class Model(Entry):
    """A model and a sample; `chosen` is what "auto" takes, `reason` is why it takes nothing."""

    chosen: tuple[str, ...] = ()
    reason: str = ""


def _model(name, build, sample, *chosen, reason=""):
    return Model(name, build, sample, {}, chosen, reason)


IMAGES, ROWS, LINES, TEXT = normal(4, 3, 16, 16), normal(4, 10), normal(4, 1, 16), words(4, 7)
LENGTHS = torch.tensor([7, 5, 6, 3])
ADJACENCY = (torch.rand(4, 6, 6, generator=_DRAW) > 0.5).float()
EDGES = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [1, 2, 0, 4, 5, 3, 7, 6]])
BAGS = torch.arange(4).expand(3, 4).contiguous(), torch.randint(9, (3, 4), generator=_DRAW)

PEOPLE = [
    _model("ResNet-18", images.resnet18, IMAGES, "layer1.0", "layer3.0", "layer4.1"),
    _model("ResNet-50", images.resnet50, IMAGES, "layer1.0", "layer3.1", "layer4.2"),
    _model(
        "DenseNet",
        images.DenseNet,
        IMAGES,
        "features.block0",
        "features.transition",
        "features.block1",
    ),
    _model("MobileNetV2", images.mobilenet_v2, IMAGES, "0.3", "0.5", "0"),
    _model("EfficientNet", images.efficientnet_se, IMAGES, "2", "3"),
    _model(
        "ConvNeXt", images.ConvNeXtStages, IMAGES, "downsample_layers.0", "stages.0", "stages.1"
    ),
    _model("ViT", images.ViT, IMAGES, "blocks.0", "blocks.2", "blocks.3"),
    _model("Swin", images.SwinTransformer, IMAGES, "layers.0", "layers.2", "layers.3"),
    _model("MLP-Mixer", images.MlpMixer, IMAGES, "blocks.0", "blocks.1", "blocks.2"),
    _model("U-Net", images.UNet2d, IMAGES, "down1.1", "down2.1"),
    _model("segmentation head", images.AsppSegmenter, IMAGES, "backbone.2", "project.2"),
    _model("detector", images.Detector, IMAGES, "body1.1", "body2.1"),
    _model("capsules", images.CapsNet, normal(4, 3, 13, 13), "conv", "primary"),
    _model("GAN discriminator", images.discriminator, IMAGES, "1", "3"),
    _model("for quantisation", images.trained_for_quantisation, IMAGES, "1", "3"),
    _model("Fourier operator", images.FourierOperator, IMAGES, "lift", "spectral.1", "local.2"),
    _model("VQ-VAE", images.VqVae, IMAGES, "encoder.1", "decoder.1"),
    _model("autoencoder", images.ConvAutoencoder, IMAGES, "encoder.1", "decoder.1", "decoder.4"),
    _model(
        "CLIP towers",
        images.ContrastiveTowers,
        (IMAGES, TEXT),
        "transformer.layers.0",
        "transformer.layers.1",
    ),
    _model("dueling DQN", numbers.DuelingDqn, IMAGES, "features.1", "advantage.1", "value.1"),
    _model(
        "BERT",
        sequences.bert,
        {"input_ids": TEXT},
        "bert.encoder.layer.0",
        "bert.encoder.layer.2",
        "bert.encoder.layer.5",
    ),
    _model(
        "GPT-2",
        sequences.gpt2,
        {"input_ids": TEXT},
        "transformer.h.0",
        "transformer.h.2",
        "transformer.h.5",
    ),
    _model(
        "Llama",
        sequences.llama,
        {"input_ids": TEXT},
        "model.layers.0",
        "model.layers.1",
        "model.layers.2",
    ),
    _model(
        "DistilBERT",
        sequences.distilbert,
        {"input_ids": TEXT},
        "distilbert.transformer.layer.0",
        "distilbert.transformer.layer.1",
        "distilbert.transformer.layer.2",
    ),
    _model(
        "T5",
        sequences.t5,
        {"input_ids": TEXT, "decoder_input_ids": words(4, 5)},
        "encoder.block.0.layer.1",
        "decoder.block.0.layer.2",
        "decoder.block.1.layer.2",
    ),
    _model(
        "ViT of transformers",
        sequences.vit_of_transformers,
        {"pixel_values": IMAGES},
        "vit.layers.0",
        "vit.layers.1",
        "vit.layers.2",
    ),
    _model("TCN", sequences.TemporalConvNet, TEXT, "network.0", "network.1", "network.2"),
    _model("WaveNet", sequences.WaveNetStack, LINES, "post.0", "post.2"),
    _model("U-Net of lines", sequences.UNet1d, LINES, "down1.2", "down2.2", "up2.1"),
    _model("Mamba", sequences.Mamba, TEXT, "layers.0", "layers.1", "layers.2"),
    _model("mixture of experts", sequences.MoeLanguageModel, TEXT, "blocks.0", "blocks.1"),
    _model("Conformer", sequences.Conformer, normal(4, 10, 5), "blocks.0", "blocks.1"),
    _model("packed LSTM", sequences.PackedLstm, (TEXT, LENGTHS), "fc.1"),
    _model(
        "GRU tagger",
        sequences.GruTagger,
        (TEXT, torch.randint(3, (4, 7), generator=_DRAW), LENGTHS),
        "proj.1",
    ),
    _model(
        "decision transformer",
        sequences.DecisionTransformer,
        (normal(4, 5, 4), normal(4, 5, 2), normal(4, 5, 1), torch.arange(5).expand(4, 5)),
        "transformer.layers.0",
        "transformer.layers.1",
    ),
    _model("Perceiver", sequences.Perceiver, normal(4, 12, 6), "project", "head.0"),
    _model(
        "Set Transformer",
        sequences.SetTransformer,
        normal(4, 6, 3),
        "encoder.0",
        "encoder.1",
        "decoder.0",
    ),
    _model(
        "small GPT of today",
        sequences.SpeedrunGpt,
        (TEXT, words(4, 7)),
        "transformer.h.0",
        "transformer.h.1",
        "transformer.h.2",
    ),
    _model("PointNet", numbers.PointNetClassifier, normal(4, 3, 9), "head.1"),
    _model(
        "DeepSets",
        numbers.MaskedDeepSets,
        (normal(4, 6, 4), torch.ones(4, 6)),
        "phi.1",
        "phi.3",
        "rho.1",
    ),
    _model(
        "graph convolution",
        numbers.DenseGcn,
        (normal(4, 6, 5), ADJACENCY),
        "layers.0",
        "layers.1",
        "norms.2",
    ),
    _model(
        "message passing",
        numbers.EdgeGnn,
        (normal(8, 4), EDGES, torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])),
        "convs.0",
        "convs.1",
    ),
    _model(
        "graph attention", numbers.Gat, (normal(6, 5), ADJACENCY[0]), "conv1.W", "conv2.W", "conv2"
    ),
    _model("DLRM", numbers.Dlrm, (normal(4, 5), *BAGS), "bot_l.1", "bot_l.3", "top_l.1"),
    _model("TabNet", numbers.TabNet, normal(4, 6), "norms.0", "norms.1"),
    _model("KAN", numbers.Kan, normal(4, 6), "layers.0", "layers.1"),
    _model("mixture density", numbers.MixtureDensity, normal(4, 6), "hidden.1", "hidden.3"),
    _model("VAE", numbers.BetaVae, ROWS, "encode.1", "encode.3", "decode.1"),
    _model(
        "NeRF",
        numbers.NerfMlp,
        (normal(4, 5, 3), normal(4, 3)),
        "pts_linears.0",
        "pts_linears.6",
        "alpha_linear",
    ),
    _model("SIREN", numbers.Siren, normal(4, 2), "net.0", "net.1", "net.2"),
    _model("neural ODE", numbers.NeuralOde, normal(4, 5), "enter"),
    _model(
        "triplets",
        numbers.TripletNet,
        (ROWS, normal(4, 10), normal(4, 10)),
        reason="runs more than once in a pass",
    ),
    _model("hypernetwork", numbers.HyperNetwork, (normal(4, 6), normal(4, 3)), "writer.1"),
    _model("RealNVP", numbers.RealNvp, normal(4, 4), "flows.0.s.1", "flows.1.s.3", "flows.2.t.1"),
    _model("early exits", numbers.EarlyExit, ROWS, "blocks.0", "blocks.1", "blocks.2"),
    _model(
        "FiLM",
        numbers.FiLM,
        {"x": normal(4, 6), "condition": normal(4, 3)},
        "films.0",
        "films.1",
        "body.1",
    ),
    _model("LoRA", numbers.lora, ROWS, "1", "3"),
    _model(
        "old weight norm",
        lambda: numbers.old_weight_norm(nn.utils.weight_norm),
        normal(4, 2, 9),
        "1",
        "3",
    ),
    _model(
        "old spectral norm",
        lambda: numbers.old_weight_norm(nn.utils.spectral_norm),
        normal(4, 2, 9),
        "1",
        "3",
    ),
]
