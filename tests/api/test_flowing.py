"""What flows past slots of a wrapped model is what a population measures of the same host."""

import torch
from torch import nn

import esper
from esper.api.ticking import measuring, slot_flow
from esper.kasmina.flow_statistics import flow_statistics
from esper.leyline.signals import FLOW_STATISTICS


def test_it_is_measured_where_the_slots_are_before_the_seeds_act() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv1d(1, 6, 3), nn.ReLU(), nn.BatchNorm1d(6), nn.Flatten(), nn.Linear(36, 4)
    )
    x = torch.randn(12, 1, 8)
    host = esper.wrap(net, sample=x, slots=["1", "2"])
    buffers = [buffer.clone() for buffer in host.buffers()]
    with measuring(host):
        found = slot_flow(host)
        expected = [
            flow_statistics(net[:2](x)[None], 1)[0],
            flow_statistics(net[:3](x)[None], 1)[0],
        ]
    assert found.shape == (1, 2, len(FLOW_STATISTICS))
    torch.testing.assert_close(found[0], torch.stack(expected).double())
    assert bool(found.isfinite().all())
    assert all(map(torch.equal, buffers, host.buffers()))
    assert not net[1]._forward_hooks, "nothing is left behind"


def test_dense_activations_have_no_roughness() -> None:
    net = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 2))
    host = esper.wrap(net, sample=torch.randn(9, 5), slots=["1"])
    with measuring(host):
        found = dict(zip(FLOW_STATISTICS, slot_flow(host)[0, 0].tolist(), strict=True))
    assert found.pop("roughness") != found["spread"]
    assert all(value == value for value in found.values())
