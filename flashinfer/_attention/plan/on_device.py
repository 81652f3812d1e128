"""Plans of an executor whose lengths are on the GPU: made there, once or by each launch."""

from __future__ import annotations

from ...jit.attention.config import PACKED_DECODE_TILES
from .choice import KernelChoice
from .executor import AttentionExecutor, _plan_first
from .launch import ALL_ROWS, GraphCapacity, PlanOptions
from .planner import slots_of_stream
from .requests import AttentionProblem, DeviceLengths


def plan_on_device(
    executor: AttentionExecutor,
    problem: AttentionProblem,
    lengths: DeviceLengths,
    options: PlanOptions,
    choice: KernelChoice,
    *,
    by_launches: bool = False,
) -> None:
    """Choose a module for requests whose lengths are on the GPU, and divide their work there.

    Parameters
    ----------
    executor : AttentionExecutor
        Its next runs compute the requests.
    problem : AttentionProblem
        Bounds of the requests.
    lengths : DeviceLengths
        Their lengths, which the kernel reads.
    options : PlanOptions
        How their work is divided: cuts where the planner wants them. Without a capacity that of the
        bounds is taken.
    choice : KernelChoice
        The portable kernel with a tile.
    by_launches : bool
        Whether kernels with tiles of decode read the lengths that there are when they run, which
        spares a launch. Otherwise, and with larger tiles, a kernel writes a work list now, which
        later runs share.

    Raises
    ------
    ValueError
        As ``AttentionExecutor.plan`` does.
    """
    requests = problem.requests
    if options.capacity is None:
        capacity = GraphCapacity(requests.batch_size, requests.num_qo_tokens)
        options = options._replace(capacity=capacity)
    key = executor._module_key(problem, None, options, choice)
    by_launches = by_launches and key.choice.tile_q in PACKED_DECODE_TILES
    key = key._replace(device_lengths=by_launches)
    executor._options = options
    executor.problem = None
    executor._run = _plan_first
    module = executor._module(key)
    workspaces = executor.workspaces
    slots = slots_of_stream(module, workspaces.floats)
    planner = executor._configured(problem, key, slots, options, ALL_ROWS)
    if by_launches:
        planner.plan(None, executor._float_bytes, requests)
    else:
        planner.plan_on_device(workspaces.ints, executor._float_bytes, requests, lengths)
    executor._lengths = lengths if by_launches else None
    executor._bind(module, problem, None)
    executor._follows_a_kernel = not by_launches
    executor.problem, executor._key, executor._run = problem, key, module.run
