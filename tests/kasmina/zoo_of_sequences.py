"""Networks for text, sound and other sequences, as people write them or configure them.

Those of `transformers` are built from a small configuration; nothing is downloaded.
Shapes: `B` batch, `C` channels, `L` positions, `T` tokens, `H` heads, `S` states.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

WORDS = 20


# --- of `transformers` -----------------------------------------------------------------------


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=WORDS, hidden_size=8, num_hidden_layers=6, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=16, num_labels=3,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    size = {"n_positions": 16, "n_embd": 8, "n_layer": 6, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, bos_token_id=0, eos_token_id=0, **size))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=8, intermediate_size=12, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def distilbert() -> nn.Module:
    from transformers import DistilBertConfig, DistilBertForTokenClassification

    config = DistilBertConfig(
        vocab_size=WORDS, dim=8, hidden_dim=16, n_layers=3, n_heads=2, max_position_embeddings=16
    )
    return DistilBertForTokenClassification(config)


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=WORDS, d_model=8, d_kv=4, d_ff=16, num_layers=2, num_heads=2,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def vit_of_transformers() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=8, num_hidden_layers=3, num_attention_heads=2, intermediate_size=16,
        image_size=16, patch_size=4, num_labels=3,
    )  # fmt: skip
    return ViTForImageClassification(config)


# --- convolutions over time ------------------------------------------------------------------


class Chomp1d(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, : -self.size].contiguous()


class TemporalBlock(nn.Module):
    def __init__(self, inner: int, outer: int, dilation: int) -> None:
        super().__init__()
        pad = 2 * dilation

        def conv(width: int) -> nn.Module:
            layer = nn.Conv1d(width, outer, 3, padding=pad, dilation=dilation)
            return parametrizations.weight_norm(layer)

        self.net = nn.Sequential(
            conv(inner), Chomp1d(pad), nn.ReLU(), nn.Dropout(0.1),
            conv(outer), Chomp1d(pad), nn.ReLU(), nn.Dropout(0.1),
        )  # fmt: skip
        self.downsample = nn.Conv1d(inner, outer, 1) if inner != outer else None
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        res = x if self.downsample is None else self.downsample(x)
        return self.relu(self.net(x) + res)


class TemporalConvNet(nn.Module):
    """On tokens, with the head at every position."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 6)
        blocks = [TemporalBlock(6, 5, 1), TemporalBlock(5, 5, 2), TemporalBlock(5, 5, 4)]
        self.network = nn.Sequential(*blocks)
        self.linear = nn.Linear(5, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.network(self.embed(x).transpose(1, 2)).transpose(1, 2))


class GatedResidual(nn.Module):
    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.dilation = dilation
        self.gated = nn.Conv1d(channels, 2 * channels, 2, dilation=dilation)
        self.residual, self.skip = nn.Conv1d(channels, channels, 1), nn.Conv1d(channels, 5, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.glu(self.gated(F.pad(x, (self.dilation, 0))), dim=1)
        return x + self.residual(h), self.skip(h)


class WaveNetStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Conv1d(1, 6, 1)
        self.stack = nn.ModuleList(GatedResidual(6, 2**index) for index in range(4))
        self.post = nn.Sequential(nn.ReLU(), nn.Conv1d(5, 5, 1), nn.ReLU(), nn.Conv1d(5, 8, 1))

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.front(x), torch.zeros(())
        for layer in self.stack:
            x, skip = layer(x)
            total = total + skip
        return self.post(total)


class UNet1d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv1d(1, 4, 5, 2, 2), nn.BatchNorm1d(4), nn.GELU())
        self.down2 = nn.Sequential(nn.Conv1d(4, 6, 5, 2, 2), nn.BatchNorm1d(6), nn.GELU())
        self.up2 = nn.Sequential(nn.ConvTranspose1d(6, 4, 4, 2, 1), nn.GELU())
        self.up1 = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv1d(8, 4, 3, padding=1))
        self.out = nn.Conv1d(5, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        d1 = self.down1(x)
        d2 = self.down2(d1)
        u = self.up1(torch.cat([self.up2(d2), d1], 1))
        return self.out(torch.cat([u, x], 1))


# --- states and attention --------------------------------------------------------------------


class MambaBlock(nn.Module):
    """A selective scan, step by step as the reference implementation has it."""

    def __init__(self, dim: int, states: int = 3) -> None:
        super().__init__()
        inner = 2 * dim
        self.norm, self.in_proj = nn.LayerNorm(dim), nn.Linear(dim, 2 * inner)
        self.conv1d = nn.Conv1d(inner, inner, 3, padding=2, groups=inner)
        self.x_proj, self.dt_proj = nn.Linear(inner, 2 * states + 2), nn.Linear(2, inner)
        self.A_log = nn.Parameter(torch.log(torch.arange(1.0, states + 1).repeat(inner, 1)))
        self.D, self.out_proj = nn.Parameter(torch.ones(inner)), nn.Linear(inner, dim)
        self.states = states

    def forward(self, x: Tensor) -> Tensor:
        h, gate = self.in_proj(self.norm(x)).chunk(2, -1)
        h = F.silu(self.conv1d(h.transpose(1, 2))[:, :, : x.shape[1]].transpose(1, 2))
        dt, B, C = self.x_proj(h).split([2, self.states, self.states], -1)
        dt, A = F.softplus(self.dt_proj(dt)), -self.A_log.exp()
        state = torch.zeros(*h[:, 0].shape, self.states)
        found = []
        for t in range(h.shape[1]):
            decay = torch.exp(dt[:, t].unsqueeze(-1) * A)
            state = decay * state + (dt[:, t] * h[:, t]).unsqueeze(-1) * B[:, t].unsqueeze(1)
            found.append((state * C[:, t].unsqueeze(1)).sum(-1))
        return x + self.out_proj((torch.stack(found, 1) + h * self.D) * F.silu(gate))


class Mamba(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 6)
        self.layers = nn.ModuleList(MambaBlock(6) for _ in range(3))
        self.norm_f, self.lm_head = nn.LayerNorm(6), nn.Linear(6, WORDS, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm_f(x))


class Expert(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(dim, 12), nn.Linear(12, dim), nn.Linear(dim, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class SparseMoe(nn.Module):
    """The two best of four experts for each token; each expert sees its own tokens only."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, 4, bias=False)
        self.experts = nn.ModuleList(Expert(dim) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.gate(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows, slot = torch.where(chosen == index)
            out.index_add_(0, rows, weights[rows, slot, None] * expert(flat[rows]))
        return out.view_as(x)


class MoeBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.moe = SparseMoe(dim)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        h, _ = self.attn(h, h, h, attn_mask=mask, is_causal=True, need_weights=False)
        x = x + h
        return x + self.moe(self.norm2(x))


class MoeLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.blocks = nn.ModuleList(MoeBlock(8) for _ in range(2))
        self.head = nn.Linear(8, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ConvModule(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.enter = nn.LayerNorm(dim), nn.Conv1d(dim, 2 * dim, 1)
        self.depthwise = nn.Conv1d(dim, dim, 3, padding=1, groups=dim)
        self.batch_norm, self.act = nn.BatchNorm1d(dim), nn.SiLU()
        self.leave = nn.Conv1d(dim, dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.glu(self.enter(self.norm(x).transpose(1, 2)), dim=1)
        return self.leave(self.act(self.batch_norm(self.depthwise(h)))).transpose(1, 2)


class ConformerBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()

        def feed_forward() -> nn.Module:
            return nn.Sequential(
                nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim)
            )

        self.ff1, self.ff2 = feed_forward(), feed_forward()
        self.attn_norm, self.norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.conv = ConvModule(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.ff1(x)
        h = self.attn_norm(x)
        x = x + self.attn(h, h, h)[0]
        x = x + self.conv(x)
        return self.norm(x + 0.5 * self.ff2(x))


class Conformer(nn.Module):
    """Speech: the spectrogram is halved in time, then blocks, then letters."""

    def __init__(self) -> None:
        super().__init__()
        self.subsample = nn.Sequential(nn.Conv1d(5, 8, 3, 2, 1), nn.ReLU())
        self.blocks = nn.ModuleList(ConformerBlock(8) for _ in range(2))
        self.letters = nn.Linear(8, 6)

    def forward(self, spectrogram: Tensor) -> Tensor:  # [B, T, F]
        x = self.subsample(spectrogram.transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.letters(x).log_softmax(-1)


class PackedLstm(nn.Module):
    """Texts of different lengths, packed; the last state decides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 6, padding_idx=0)
        self.lstm = nn.LSTM(6, 7, num_layers=2, batch_first=True, dropout=0.2)
        self.fc = nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 3))

    def forward(self, text: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(
            self.embedding(text), lengths, batch_first=True, enforce_sorted=False
        )
        _, (hidden, _) = self.lstm(packed)
        return self.fc(hidden[-1])


class GruTagger(nn.Module):
    """Tags for every word, from both directions, with letters' features beside the words'."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.caps = nn.Embedding(WORDS, 6), nn.Embedding(3, 2)
        self.gru = nn.GRU(8, 5, bidirectional=True, batch_first=True)
        self.proj = nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Dropout(0.1))
        self.tags = nn.Linear(8, 4)

    def forward(self, words: Tensor, caps: Tensor, lengths: Tensor) -> Tensor:
        x = torch.cat([self.words(words), self.caps(caps)], -1)
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        h, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        return self.tags(self.proj(h))


class DecisionTransformer(nn.Module):
    """Returns, states and actions in turns, one transformer over all; predicts the actions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_return, self.embed_state = nn.Linear(1, 8), nn.Linear(4, 8)
        self.embed_action, self.embed_time = nn.Linear(2, 8), nn.Embedding(12, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True)
        self.transformer = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.predict_action = nn.Sequential(nn.Linear(8, 2), nn.Tanh())

    def forward(
        self, states: Tensor, actions: Tensor, returns: Tensor, times: Tensor
    ) -> dict[str, Any]:
        when = self.embed_time(times)
        parts = self.embed_return(returns), self.embed_state(states), self.embed_action(actions)
        B, T, C = when.shape
        x = torch.stack([part + when for part in parts], 2).view(B, 3 * T, C)
        mask = nn.Transformer.generate_square_subsequent_mask(3 * T)
        x = self.transformer(x, mask=mask, is_causal=True)
        return {"actions": self.predict_action(x.view(B, T, 3, C)[:, :, 1])}


class Perceiver(nn.Module):
    """A few latents look at a long input, then at themselves, with shared weights."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(5, 8))
        self.project = nn.Linear(6, 8)
        self.cross = nn.MultiheadAttention(8, 2, batch_first=True)
        self.inner = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.head = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        x, h = self.project(x), self.latents.expand(x.shape[0], -1, -1)
        for _ in range(2):
            h = h + self.cross(h, x, x, need_weights=False)[0]
            h = self.inner(h)
        return self.head(h.mean(1))


class Mab(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc_q, self.fc_k, self.fc_v = (
            nn.Linear(dim, dim),
            nn.Linear(dim, dim),
            nn.Linear(dim, dim),
        )
        self.fc_o, self.ln0, self.ln1 = nn.Linear(dim, dim), nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        q, k, v = self.fc_q(left), self.fc_k(right), self.fc_v(right)
        parts = [torch.cat(each.split(4, 2), 0) for each in (q, k, v)]  # heads beside the batch
        weights = torch.softmax(parts[0] @ parts[1].mT / math.sqrt(8), 2)
        h = self.ln0(torch.cat((parts[0] + weights @ parts[2]).split(len(q), 0), 2))
        return self.ln1(h + F.relu(self.fc_o(h)))


class Sab(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mab = Mab(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.mab(x, x)


class SetTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(3, 8)
        self.encoder = nn.Sequential(Sab(8), Sab(8))
        self.seeds, self.pool = nn.Parameter(torch.randn(1, 2, 8)), Mab(8)
        self.decoder = nn.Sequential(Sab(8), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(self.enter(x))
        return self.decoder(self.pool(self.seeds.expand(len(x), -1, -1), h))


class Rotary(nn.Module):
    """Positions as rotations, with tables that grow when a longer text comes."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inv_freq = 1.0 / 100 ** (torch.arange(0, dim, 2) / dim)
        self.cached: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:  # [B, H, T, C]
        if self.cached is None or len(self.cached) < x.shape[2]:
            angles = torch.outer(torch.arange(x.shape[2]), self.inv_freq)
            self.cached = torch.cat([angles, angles], -1)
        angles = self.cached[: x.shape[2]]
        left, right = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-right, left], -1) * angles.sin()


class RotaryBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.rotary = Rotary(dim // 2)
        self.fc1, self.fc2 = nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (
            part.view(B, T, 2, C // 2).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.fc2(F.relu(self.fc1(self.norm2(x))).square())


class SpeedrunGpt(nn.Module):
    """As people write a small GPT today: RMS norms, rotations, squared ReLU, loss inside."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(WORDS, 8), "h": nn.ModuleList(RotaryBlock(8) for _ in range(3))}
        )
        self.lm_head = nn.Linear(8, WORDS, bias=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = F.rms_norm(self.transformer["wte"](idx), (8,))
        for block in self.transformer["h"]:
            x = block(x)
        logits = 15 * torch.tanh(self.lm_head(F.rms_norm(x, (8,))) / 15)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, WORDS), targets.view(-1))
