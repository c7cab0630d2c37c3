"""Networks for tables, points, graphs, functions and densities, as people write them.

Shapes: `B` batch, `C` channels, `N` nodes or points, `E` edges.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# --- sets, points and graphs -----------------------------------------------------------------


class TNet(nn.Module):
    """Learns a rotation of the points."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k, self.conv1, self.conv2 = k, nn.Conv1d(k, 6, 1), nn.Conv1d(6, 8, 1)
        self.fc1, self.fc2 = nn.Linear(8, 6), nn.Linear(6, k * k)
        self.bn1, self.bn2 = nn.BatchNorm1d(6), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x))).max(2)[0]
        x = self.fc2(F.relu(self.fc1(x)))
        return x.view(-1, self.k, self.k) + torch.eye(self.k)


class PointNetClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stn, self.conv1, self.bn1 = TNet(3), nn.Conv1d(3, 6, 1), nn.BatchNorm1d(6)
        self.conv2, self.bn2 = nn.Conv1d(6, 10, 1), nn.BatchNorm1d(10)
        self.head = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # [B, 3, N]
        turn = self.stn(x)
        x = torch.bmm(x.transpose(2, 1), turn).transpose(2, 1)
        x = F.relu(self.bn1(self.conv1(x)))
        x = torch.max(self.bn2(self.conv2(x)), 2)[0]
        return self.head(x), turn


class MaskedDeepSets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phi = nn.Sequential(nn.Linear(4, 8), nn.ELU(inplace=True), nn.Linear(8, 7), nn.ELU())
        self.rho = nn.Sequential(nn.Linear(7, 6), nn.ELU(inplace=True), nn.Linear(6, 1))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.phi(x) * mask.unsqueeze(-1)
        return self.rho(h.sum(1) / mask.sum(1, keepdim=True)).squeeze(-1)


class DenseGcn(nn.Module):
    """Batches of small graphs with dense adjacencies."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(inner, 8) for inner in (5, 8, 8))
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
        self.readout = nn.Linear(8, 3)

    def forward(self, x: Tensor, adj: Tensor) -> Tensor:  # [B, N, C], [B, N, N]
        degree = adj.sum(-1, keepdim=True).clamp(min=1)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = F.relu(norm(adj @ layer(x) / degree))
        return self.readout(x.mean(1))


class MessageLayer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * dim, dim), nn.ReLU())
        self.update = nn.Sequential(nn.Linear(2 * dim, dim), nn.ReLU())

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        messages = self.message(torch.cat([x[source], x[target]], -1))
        total = torch.zeros_like(x).index_add_(0, target, messages)
        return x + self.update(torch.cat([x, total], -1))


class EdgeGnn(nn.Module):
    """Nodes of all graphs in one axis, with lists of edges, pooled by graph with scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 6)
        self.convs = nn.ModuleList(MessageLayer(6) for _ in range(2))
        self.head = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        x = self.enter(x)
        for conv in self.convs:
            x = conv(x, edge_index)
        graphs = int(batch.max()) + 1
        pooled = torch.zeros(graphs, 6).scatter_add(0, batch[:, None].expand(-1, 6), x)
        return self.head(pooled)


class GatLayer(nn.Module):
    """Graph attention with two heads over a dense adjacency."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.W, self.a = (
            nn.Linear(inner, 2 * outer, bias=False),
            nn.Parameter(torch.randn(2, 2 * outer)),
        )
        self.outer, self.leakyrelu = outer, nn.LeakyReLU(0.2)

    def forward(self, x: Tensor, adj: Tensor) -> Tensor:
        h = self.W(x).view(len(x), 2, self.outer)
        left = torch.einsum("nhc,hc->nh", h, self.a[:, : self.outer])
        right = torch.einsum("nhc,hc->nh", h, self.a[:, self.outer :])
        scores = self.leakyrelu(left[:, None] + right[None]).masked_fill(adj[..., None] == 0, -9e15)
        return torch.einsum("nmh,mhc->nhc", scores.softmax(1), h).flatten(1)


class Gat(nn.Module):
    """One graph whose nodes are classified: the rows are nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = GatLayer(5, 4), GatLayer(8, 4)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor, adj: Tensor) -> Tensor:
        x = F.elu(self.conv1(F.dropout(x, 0.2, self.training), adj))
        return self.out(F.elu(self.conv2(x, adj)))


# --- tables ----------------------------------------------------------------------------------


class Dlrm(nn.Module):
    """Bags of categories, a bottom net for numbers, products of all pairs, a top net."""

    def __init__(self) -> None:
        super().__init__()
        self.bot_l = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU())
        self.emb_l = nn.ModuleList(nn.EmbeddingBag(9, 6, mode="sum") for _ in range(3))
        self.top_l = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 1), nn.Sigmoid())

    def forward(self, dense: Tensor, offsets: Tensor, indices: Tensor) -> Tensor:
        x = self.bot_l(dense)
        bags = [bag(indices[k], offsets[k]) for k, bag in enumerate(self.emb_l)]
        T = torch.stack([x, *bags], 1)
        rows, columns = torch.tril_indices(4, 4, -1)
        pairs = torch.bmm(T, T.transpose(1, 2))[:, rows, columns]
        return self.top_l(torch.cat([x, pairs], 1))


class GhostBatchNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(dim)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.bn(part) for part in x.chunk(2, 0)], 0)


class TabNet(nn.Module):
    """Steps of attention over features; one feature transformer is shared by all steps."""

    def __init__(self) -> None:
        super().__init__()
        self.initial_bn = nn.BatchNorm1d(6)
        self.shared = nn.Linear(6, 16)
        self.steps = nn.ModuleList(nn.Linear(8, 16) for _ in range(2))
        self.norms = nn.ModuleList(GhostBatchNorm(8) for _ in range(2))
        self.attentive = nn.ModuleList(nn.Linear(4, 6) for _ in range(2))
        self.final = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.initial_bn(x)
        prior, att = torch.ones_like(x), torch.zeros(len(x), 4)
        out, entropy = torch.zeros(len(x), 4), torch.zeros(())
        for step, norm, attentive in zip(self.steps, self.norms, self.attentive, strict=True):
            mask = torch.softmax(attentive(att) * prior, -1)
            prior = prior * (1.3 - mask)
            entropy = entropy - (mask * (mask + 1e-8).log()).sum(1).mean()
            h = norm(F.glu(self.shared(mask * x), -1))
            d, att = F.glu(step(h), -1).split(4, -1)
            out = out + F.relu(d)
        return self.final(out), entropy


class KanLinear(nn.Module):
    """A spline for every pair of in- and output, beside a linear path, as in efficient-kan."""

    def __init__(self, inner: int, outer: int, grid: int = 4) -> None:
        super().__init__()
        self.register_buffer("grid", torch.linspace(-1.5, 1.5, grid))
        self.base_weight = nn.Parameter(torch.randn(outer, inner) / math.sqrt(inner))
        self.spline_weight = nn.Parameter(0.1 * torch.randn(outer, inner * grid))
        self.base_activation = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        bases = torch.exp(-(x.unsqueeze(-1) - self.grid).square())
        spline = F.linear(bases.flatten(-2), self.spline_weight)
        return F.linear(self.base_activation(x), self.base_weight) + spline


class Kan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(KanLinear(a, b) for a, b in ((6, 7), (7, 8), (8, 3)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class MixtureDensity(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 8), nn.Tanh())
        self.pi, self.mu, self.sigma = nn.Linear(8, 3), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.hidden(x)
        return self.pi(h).log_softmax(-1), self.mu(h), self.sigma(h).exp()


# --- functions and densities -----------------------------------------------------------------


class BetaVae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
        self.fc_mu, self.fc_var = nn.Linear(8, 3), nn.Linear(8, 3)
        self.decode = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 10))

    def forward(self, x: Tensor) -> list[Tensor]:
        h = self.encode(x)
        mu, log_var = self.fc_mu(h), self.fc_var(h)
        z = mu + torch.randn_like(mu) * (0.5 * log_var).exp()
        return [self.decode(z), mu, log_var]


class NerfMlp(nn.Module):
    """Frequencies of a point, eight layers with the point again at the fifth, then the view."""

    def __init__(self) -> None:
        super().__init__()
        width, point, view = 8, 3 + 3 * 4, 3
        sizes = [point, *[width] * 3, width + point, *[width] * 3]
        self.pts_linears = nn.ModuleList(nn.Linear(size, width) for size in sizes)
        self.alpha_linear, self.feature_linear = nn.Linear(width, 1), nn.Linear(width, width)
        self.views_linear, self.rgb_linear = nn.Linear(width + view, 4), nn.Linear(4, 3)

    def forward(self, points: Tensor, views: Tensor) -> Tensor:  # [B, N, 3], [B, 3]
        waves = [wave(points * 2.0**k) for k in range(2) for wave in (torch.sin, torch.cos)]
        encoded = torch.cat([points, *waves], -1)
        h = encoded
        for index, layer in enumerate(self.pts_linears):
            h = F.relu(layer(h))
            if index == 3:
                h = torch.cat([encoded, h], -1)
        feature = torch.cat([self.feature_linear(h), views[:, None].expand_as(points)], -1)
        rgb = self.rgb_linear(F.relu(self.views_linear(feature)))
        return torch.cat([rgb, self.alpha_linear(h)], -1)


class SineLayer(nn.Module):
    def __init__(self, inner: int, outer: int, omega: float = 30.0) -> None:
        super().__init__()
        self.omega, self.linear = omega, nn.Linear(inner, outer)
        with torch.no_grad():
            self.linear.weight.uniform_(-1 / inner, 1 / inner)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.omega * self.linear(x))


class Siren(nn.Module):
    """A function of coordinates; returns them too, for derivatives."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(SineLayer(a, 8) for a in (2, 8, 8)), nn.Linear(8, 1))

    def forward(self, coords: Tensor) -> tuple[Tensor, Tensor]:
        coords = coords.clone().detach().requires_grad_(True)
        return self.net(coords), coords


class OdeFunc(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 6))

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.net(torch.cat([y, t.expand(len(y), 1)], -1))


class NeuralOde(nn.Module):
    """Four steps of fixed size by Runge and Kutta: one module runs sixteen times in a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.func, self.leave = nn.Linear(5, 6), OdeFunc(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y, h = self.enter(x), 0.25
        for step in range(4):
            t = torch.tensor(step * h)
            k1 = self.func(t, y)
            k2 = self.func(t + h / 2, y + h / 2 * k1)
            k3 = self.func(t + h / 2, y + h / 2 * k2)
            y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + self.func(t + h, y + h * k3))
        return self.leave(y)


class TripletNet(nn.Module):
    """One encoder for three inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Linear(10, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5)
        )

    def forward(self, anchor: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        a, p, n = (F.normalize(self.encoder(x), dim=-1) for x in (anchor, positive, negative))
        return (a * p).sum(-1) - (a * n).sum(-1)


class HyperNetwork(nn.Module):
    """One net writes the weights of another, which is run by hand for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.writer = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6 * 4 + 4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        written = self.writer(context)
        weight, bias = written[:, :24].view(-1, 4, 6), written[:, 24:]
        h = torch.bmm(weight, x.unsqueeze(-1)).squeeze(-1) + bias
        return self.head(torch.tanh(h))


class Coupling(nn.Module):
    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)
        self.s = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(), nn.Linear(8, 4), nn.Tanh())
        self.t = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept = x * self.mask
        s, t = self.s(kept) * (1 - self.mask), self.t(kept) * (1 - self.mask)
        return kept + (1 - self.mask) * (x * s.exp() + t), s.sum(-1)


class RealNvp(nn.Module):
    """Returns the log-likelihood of each sample."""

    def __init__(self) -> None:
        super().__init__()
        mask = torch.tensor([1.0, 0.0, 1.0, 0.0])
        self.flows = nn.ModuleList(Coupling(mask if i % 2 else 1 - mask) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(len(x))
        for flow in self.flows:
            x, log_det = flow(x)
            total = total + log_det
        return total - 0.5 * x.square().sum(-1)


class EarlyExit(nn.Module):
    """Stops in evaluation as soon as it is sure; in training every exit counts."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(a, 8), nn.ReLU()) for a in (10, 8, 8))
        self.exits = nn.ModuleList(nn.Linear(8, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for block, leave in zip(self.blocks, self.exits, strict=True):
            x = block(x)
            found.append(leave(x))
            if not self.training and bool(found[-1].softmax(-1).amax(-1).min() > 0.9):
                break
        return torch.stack(found).mean(0)


class FiLM(nn.Module):
    """Features scaled and shifted by a condition; takes keyword arguments only."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(a, 8) for a in (6, 8))
        self.films = nn.ModuleList(nn.Linear(3, 16) for _ in range(2))
        self.head = nn.Linear(8, 2)

    def forward(self, **inputs: Tensor) -> Tensor:
        x = inputs["x"]
        for layer, film in zip(self.body, self.films, strict=True):
            scale, shift = film(inputs["condition"]).chunk(2, -1)
            x = F.relu(layer(x) * (1 + scale) + shift)
        return self.head(x)


class LoraLinear(nn.Linear):
    """A frozen layer with a low-rank addition, as a layer of its own."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__(inner, outer)
        self.weight.requires_grad_(False)
        self.A, self.B = nn.Linear(inner, 2, bias=False), nn.Linear(2, outer, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.B(self.A(x))


def lora() -> nn.Module:
    return nn.Sequential(
        LoraLinear(10, 8), nn.ReLU(inplace=True), LoraLinear(8, 8), nn.ReLU(inplace=True),
        LoraLinear(8, 3),
    )  # fmt: skip


def old_weight_norm(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """Torch's older norms of weights, which compute the weight in a hook."""
    return nn.Sequential(
        norm(nn.Conv1d(2, 5, 3, padding=1)), nn.ReLU(), norm(nn.Conv1d(5, 6, 3, padding=1)),
        nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(6, 3),
    )  # fmt: skip


class DuelingDqn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 4, 4, 2), nn.ReLU(), nn.Conv2d(4, 6, 3, 2), nn.ReLU(), nn.Flatten()
        )
        self.value = nn.Sequential(nn.Linear(54, 8), nn.ReLU(), nn.Linear(8, 1))
        self.advantage = nn.Sequential(nn.Linear(54, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x / 255.0)
        advantage = self.advantage(h)
        return self.value(h) + advantage - advantage.mean(1, keepdim=True)
