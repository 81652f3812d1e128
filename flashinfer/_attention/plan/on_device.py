"""Plans of an executor whose lengths are on the GPU, made by a kernel there."""

from __future__ import annotations

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
) -> None:
    """Choose a module, and let a kernel plan requests whose lengths are on the GPU.

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
    executor._options = options
    executor.problem = None
    executor._run = _plan_first
    module = executor._module(key)
    workspaces = executor.workspaces
    slots = slots_of_stream(module, workspaces.floats)
    planner = executor._configured(problem, key, slots, options, ALL_ROWS)
    planner.plan_on_device(workspaces.ints, executor._float_bytes, requests, lengths)
    executor._bind(module, problem, None)
    executor._follows_a_kernel = True
    executor.problem, executor._key, executor._run = problem, key, module.run
