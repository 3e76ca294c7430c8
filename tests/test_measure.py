"""shared.measure: bytes counted on storages, the most of them in a step, and bytes sent."""

import socket
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shared import measure, models, ranks


def test_a_storage_is_counted_once_and_whole():
    base = torch.zeros(10, 4)
    assert measure.storage_bytes([base, base[2:5], base.view(40)]) == 160
    assert measure.storage_bytes([base[:1]]) == 160  # a slice keeps all of it in memory
    assert measure.storage_bytes([base, torch.zeros(3, dtype=torch.bfloat16)]) == 166
    assert measure.storage_bytes([]) == 0


def test_autograd_keeps_the_whole_storage_of_a_view():
    windows, saved = torch.zeros(1280, 64, dtype=torch.int64), []
    embedding = nn.Embedding(256, 8)
    for tokens in (windows[:4], windows[:4].clone()):
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda kept: kept):
            embedding(tokens)
    assert [measure.storage_bytes([tensor]) for tensor in saved] == [1280 * 64 * 8, 4 * 64 * 8]


def test_the_state_of_adam_grows_with_the_first_step():
    model = nn.Linear(50, 20)
    optimizer = torch.optim.AdamW(model.parameters())
    num_parameters = 50 * 20 + 20
    assert measure.state_bytes(model, optimizer) == 4 * num_parameters
    model(torch.ones(1, 50)).sum().backward()
    optimizer.step()
    expected = measure.predicted_state_bytes("ddp", "fp32", num_parameters, world_size=8)
    assert measure.state_bytes(model, optimizer) == pytest.approx(expected, rel=0.001)  # and two counters of steps


def test_the_peak_includes_what_was_there_and_what_came_and_went():
    memory = measure.PeakMemory(torch.device("cpu"))
    there = torch.zeros(1000)
    memory.start(there)
    gone = there + there.repeat(5).sum()
    del gone
    peak = memory.stop()
    assert 4 * 6000 <= peak < 4 * 6000 + 8192
    memory.start(there)
    assert memory.stop() < peak  # each watch begins anew


@pytest.mark.parametrize(
    ("preset", "millions"), [("124m", 124), ("350m", 354), ("1b", 1300), ("7b", 6700), ("13b", 12900)]
)
def test_presets_have_the_size_of_the_gpts_whose_widths_they_take(preset, millions):
    config = models.GPT_PRESETS[preset]
    with torch.device("meta"):
        model = models.GPT(config)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    of_words = (50_257 - config.vocab_size) * config.dim  # theirs have a vocabulary of 50,257 words, ours of 256 bytes
    assert (num_parameters + of_words) / 1e6 == pytest.approx(millions, rel=0.05)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts what a connection has sent")
def test_bytes_sent_over_tcp_are_counted_by_the_kernel():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        connection, _ = server.accept()
        before = measure.tcp_bytes_sent()
        message = bytes(300_000)
        thread = threading.Thread(target=client.sendall, args=[message])
        thread.start()
        received = 0
        while received < len(message):
            received += len(connection.recv(65_536))
        thread.join()
        connection.close()
        assert measure.tcp_bytes_sent() - before == len(message)
        client.sendall(b"")  # counting has left the connection open


def sent_on_this_rank() -> list[dict[str, int]]:
    """Return the bytes that this one of four ranks sends in each operation, by its name."""
    pairs, _ = dist.new_subgroups(group_size=2)
    rank, x = dist.get_rank(), torch.ones(4)
    operations = [
        lambda: dist.all_reduce(x),
        lambda: dist.all_reduce(x, group=pairs),
        lambda: dist.all_gather_into_tensor(torch.empty(16), x),
        lambda: dist.reduce_scatter_tensor(torch.empty(1), x),
        lambda: dist.all_to_all_single(torch.empty(4), x),
        lambda: dist.all_to_all_single(torch.empty(4 * rank), torch.ones(6), [rank] * 4, [0, 1, 2, 3]),
        lambda: dist.send(x, 1) if rank == 0 else dist.recv(x, 0) if rank == 1 else None,
        dist.barrier,
    ]
    sent = []
    for operation in operations:
        with measure.Traffic() as traffic:
            operation()
        sent.append(dict(traffic.sent))
    return sent


def test_traffic_goes_by_the_group_the_parts_and_the_direction():
    """A tensor of four float32 numbers has 16 bytes."""
    for rank, sent in enumerate(ranks.run(sent_on_this_rank, 4)):
        assert sent[:2] == [{"allreduce": 24}, {"allreduce": 16}]
        assert sent[2:5] == [{"allgather": 48}, {"reduce_scatter": 12}, {"alltoall": 12}]
        assert sent[5] == {"alltoall": 4 * (6 - rank)}  # all except what it keeps
        assert sent[6:] == [{0: {"send": 16}, 1: {"recv": 0}}.get(rank, {}), {}]
