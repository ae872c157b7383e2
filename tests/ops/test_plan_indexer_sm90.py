"""Hopper's plan kernel: its own source on the CPU in the emulator, and on a Hopper device where there is one."""

from __future__ import annotations

import pytest
import torch
from tests.ops.emulator import emulated_plan
from tests.ops.hopper import on_hopper
from tests.ops.test_plan_indexer import enumerate_units

from tetrad.ops import plan_indexer
from tetrad.ops.plan_indexer import sm90

SCHEDULES = [
    (1, 1, 131_072, 512, 132),
    (64, 64, 32_768, 512, 132),
    (9, 9, 2560, 9, 3),
    (700, 50, 40_000, 700, 132),
    (600, 1, 3000, 600, 132),
    (5, 5, 0, 512, 7),
    (0, 1, 10, 3, 5),
]


@pytest.mark.parametrize("threads", [128, 1024])
@pytest.mark.parametrize(("rows", "requests", "width", "slots", "shares"), SCHEDULES)
def test_plan_and_schedule(threads, rows, requests, width, slots, shares):
    """The plan is the reference's to the last integer. In the schedule a tile in no share would be a hole in the
    scores, a tile in two shares is time, and a share much larger than the others is what all wait for."""
    generator = torch.Generator().manual_seed(rows)
    ends = torch.randint(0, width + 1, (rows,), generator=generator).int()
    request = (torch.arange(rows) // max(1, -(-rows // requests))).int()
    request[torch.rand(rows, generator=generator) < 0.05] = -1
    buffer, schedule = emulated_plan(request, ends, width, slots, threads=threads, shares=shares)
    assert buffer.tolist() == enumerate_units(request.tolist(), ends.tolist(), slots, width)
    check_schedule(schedule, request, ends, shares)


def check_schedule(schedule, request, ends, shares):
    wanted = groups_of(request.tolist(), ends.tolist())
    groups = schedule[2 * shares :].tolist()[: len(wanted)]
    assert groups == wanted
    tiles = [-(-group[3] // 64) for group in groups]
    reached, costs = (0, 0), []
    for begin, begin_tile, last, last_tile, *own in schedule[: 2 * shares].view(shares, 8).tolist():
        if (begin, begin_tile) == (last, last_tile):
            continue
        assert own == groups[begin]
        assert (begin, begin_tile) in (reached, (reached[0] - 1, tiles[reached[0] - 1]))
        spans = [
            (group, begin_tile if group == begin else 0, last_tile if group == last else tiles[group])
            for group in range(begin, min(last + 1, len(groups)))
        ]
        assert all(0 <= first <= stop <= tiles[group] for group, first, stop in spans)
        costs.append(sum((stop - first) * (3 + 2 * groups[group][1]) for group, first, stop in spans))
        reached = (last, last_tile) if last == len(groups) or last_tile < tiles[last] else (last + 1, 0)
    assert reached == (len(groups), 0)
    assert sum(costs) == sum(count * (3 + 2 * group[1]) for count, group in zip(tiles, groups, strict=True))
    if costs:
        assert max(costs) <= sum(costs) / shares + 3 + 2 * 8


def groups_of(request, ends):
    """Up to eight adjacent rows of one request each, those that see anything."""
    groups, row = [], 0
    while row < len(request):
        stop = row
        while stop < len(request) and request[stop] == request[row]:
            stop += 1
        for first in range(row, stop, 8):
            rows = min(8, stop - first)
            if request[row] >= 0 and max(ends[first : first + rows]) > 0:
                groups.append([first, rows, request[row], max(ends[first : first + rows])])
        row = stop
    return groups


@on_hopper
def test_schedule_covers_every_tile_once_on_hopper():
    """A tile in no share is a hole in the scores; one in two shares is time."""
    generator = torch.Generator().manual_seed(1)
    for rows, requests, width in ((1, 1, 131_072), (64, 64, 32_768), (4096, 1, 16_384), (32_768, 9, 5000), (5, 5, 0)):
        ends = torch.randint(0, width + 1, (rows,), generator=generator).int()
        request = (torch.arange(rows) // -(-rows // requests)).int()
        request[torch.rand(rows, generator=generator) < 0.05] = -1
        plan = plan_indexer(request.cuda(), ends.cuda(), width=width)
        assert plan.schedule is not None
        check_schedule(plan.schedule.cpu(), request, ends, sm90.shares(plan.buffer.device))
