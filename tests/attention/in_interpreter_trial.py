"""The first use of a specialisation of the Triton kernels: a small problem decides whether it is used.

test_triton.py runs this file in a process of its own, like in_interpreter.py. The trial is for GPUs; here it is made in
the interpreter, with kernels that are broken on purpose.
"""

from __future__ import annotations

import os
import warnings

import pytest
import torch

from headwise import attend, explain, head_stats
from headwise.attention.backends.protocol import NO_EXTRA, ExtraOutputs
from headwise.attention.backends.triton import backward, kernel, launch, trial
from headwise.attention.call import StatsRequest, build_call
from helpers.attention_cases import TRITON, forced, random_case
from helpers.gradient_bounds import compute_gradients

assert os.environ.get("TRITON_INTERPRET") == "1", "run test_triton.py instead"

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter is NumPy, which warns of every NaN


@pytest.fixture(autouse=True)
def _trials(monkeypatch):
    """Every kind of call is new, and has to be tried."""
    monkeypatch.setattr(trial, "_failures", {})
    monkeypatch.setattr(trial, "is_needed", lambda device: True)
    with forced(TRITON):
        yield


class Broken:
    """A kernel that is followed by a mistake: `spoil` receives its arguments."""

    def __init__(self, original, spoil):
        self.original, self.spoil = original, spoil
        self.launches = 0

    def __getitem__(self, grid):
        def run(*arguments, **options):
            self.launches += 1
            self.original[grid](*arguments, **options)
            self.spoil(*arguments)

        return run


def break_kernel(monkeypatch, module, name, spoil) -> Broken:
    broken = Broken(getattr(module, name), spoil)
    monkeypatch.setattr(module, name, broken)
    return broken


def spoil_last_row(q, k, v, out, *others):
    """The mistake of an index that is off by one."""
    out[:, -1, -1] = out[:, -1, 0]


def call_twice(**options) -> tuple[torch.Tensor, list[str]]:
    """The output of the second of two calls, and the warnings of both."""
    case = random_case().tensors(torch.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", category=RuntimeWarning)
        for _ in range(2):
            out = attend(case.q, case.k, case.v, **options)
    return out, [str(warning.message) for warning in caught]


def expected(**options) -> torch.Tensor:
    case = random_case().tensors(torch.float32)
    with forced("one block of rows"):
        return attend(case.q, case.k, case.v, **options)


def test_a_kernel_that_passes_its_trial_is_used_and_tried_once(monkeypatch):
    counted = break_kernel(monkeypatch, kernel, "attend", lambda *arguments: None)
    out, messages = call_twice(causal=True)
    assert not messages and counted.launches == 4  # two in the trial, with and without lse, and the two calls
    torch.testing.assert_close(out, expected(causal=True), rtol=1e-4, atol=1e-5)
    case = random_case().tensors(torch.float32)
    assert explain(case.q, case.k, case.v, causal=True).startswith("triton: one pass on cuda")


def test_a_broken_kernel_is_announced_once_and_pytorch_computes_instead(monkeypatch):
    break_kernel(monkeypatch, kernel, "attend", spoil_last_row)
    out, messages = call_twice(causal=True)
    assert len(messages) == 1
    assert "the triton kernel differs from PyTorch on cpu: output is off by" in messages[0]
    assert "PyTorch computes such calls instead (forward pass, float32, 4 wide, grouped heads, causal)" in messages[0]
    torch.testing.assert_close(out, expected(causal=True), rtol=1e-4, atol=1e-5)
    case = random_case().tensors(torch.float32)
    assert "the triton kernel differs from PyTorch on cpu" in explain(case.q, case.k, case.v, causal=True)


def test_the_warning_names_the_line_of_the_caller(monkeypatch):
    break_kernel(monkeypatch, kernel, "attend", spoil_last_row)
    case = random_case().tensors(torch.float32)
    with pytest.warns(UserWarning, match="the triton kernel differs") as caught:
        attend(case.q, case.k, case.v)
    assert [warning.filename for warning in caught if warning.category is UserWarning] == [__file__]


def test_a_kernel_that_cannot_be_compiled_is_not_used(monkeypatch):
    def fail(*arguments):
        raise RuntimeError("out of resource: shared memory")

    break_kernel(monkeypatch, kernel, "attend", fail)
    out, messages = call_twice(causal=True)
    assert len(messages) == 1 and "cannot be used on cpu (RuntimeError: out of resource: shared memory)" in messages[0]
    torch.testing.assert_close(out, expected(causal=True), rtol=1e-4, atol=1e-5)


def test_a_lack_of_memory_is_no_verdict(monkeypatch):
    def fail(*arguments):
        raise torch.OutOfMemoryError("no memory")

    case = random_case().tensors(torch.float32)
    with monkeypatch.context() as patch:
        break_kernel(patch, kernel, "attend", fail)
        with pytest.raises(torch.OutOfMemoryError):
            attend(case.q, case.k, case.v)
    assert explain(case.q, case.k, case.v).startswith("triton")


def test_one_specialisation_that_fails_leaves_the_others_in_use(monkeypatch):
    def spoil_softcap(q, k, v, out, *others):
        if 2.0 in [x for x in others if isinstance(x, float)]:
            spoil_last_row(q, k, v, out)

    break_kernel(monkeypatch, kernel, "attend", spoil_softcap)
    assert len(call_twice(softcap=2.0)[1]) == 1
    assert not call_twice()[1]
    case = random_case().tensors(torch.float32)
    assert explain(case.q, case.k, case.v, softcap=2.0).startswith("blockwise")
    assert explain(case.q, case.k, case.v).startswith("triton")


def test_wrong_statistics_are_noticed(monkeypatch):
    def spoil_distance(*arguments):
        sums = next(x for x in arguments if isinstance(x, torch.Tensor) and x.dim() == 4 and len(x) >= 9)
        sums[3] *= 1.1

    break_kernel(monkeypatch, kernel, "attend", spoil_distance)
    case = random_case().tensors(torch.float32)
    with pytest.warns(UserWarning, match="the statistic distance is off by"):
        _, stats = head_stats(case.q, case.k, case.v)
    with forced("one block of rows"):
        want = head_stats(case.q, case.k, case.v)[1]
    torch.testing.assert_close(stats.distance, want.distance, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "position"), [("query_gradients", "q"), ("key_gradients", "k")])
@pytest.mark.parametrize("options", [{}, {"dropout": 0.5}], ids=["", "dropout"])
def test_a_broken_backward_pass_leaves_gradients_to_pytorch(monkeypatch, name, position, options):
    def spoil_gradient(*arguments):
        gradient = next(x for x in arguments[8:] if isinstance(x, torch.Tensor) and x.dim() == 4)
        gradient[0, -1] *= 1.1

    case, grad_out = random_case().tensors(torch.float32), torch.randn(2, 6, 5, 3)
    case.options.update(options)
    torch.manual_seed(1)
    with forced("one block of rows"):
        want = compute_gradients(case, grad_out)
    broken = break_kernel(monkeypatch, backward, name, spoil_gradient)
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match=f"gradient of {position} is off by") as caught:
        got = compute_gradients(case, grad_out)
    assert broken.launches == 1 and len([warning for warning in caught if warning.category is UserWarning]) == 1
    for key, gradient in got.items():
        torch.testing.assert_close(gradient, want[key], rtol=1e-4, atol=1e-5)
    assert explain(case.q, case.k, case.v, **options).startswith("triton")


KINDS = {
    "decoding": ((2, 6, 2, 1, 40), {"lengths": torch.tensor([39, 17]), "offset": torch.tensor([38, 16])}),
    "a bool mask": ((2, 4, 4, 5, 7), {"mask": torch.ones(5, 7, dtype=torch.bool), "keep_first": 2, "window": (1, 0)}),
    "a padding mask": ((2, 4, 4, 5, 7), {"mask": torch.ones(2, 1, 1, 7, dtype=torch.bool), "causal": True}),
    "everything": (
        (2, 4, 2, 5, 7),
        {
            "mask": torch.zeros(2, 4, 5, 7), "window": [(1, 0), (None, 0), (2, 0), (3, None)],
            "keep_first": [1, 0, 2, 3], "starts": torch.tensor([0, 1]), "lengths": torch.tensor([7, 6]),
            "offset": torch.tensor([1, 2]), "softcap": 2.0, "sinks": torch.zeros(4),
            "gates": torch.ones(2, 4), "dropout": 0.1,
        },
    ),
    "windows per group": ((2, 4, 2, 5, 7), {"window": [(1, 0), (1, 0), (3, None), (3, None)]}),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("path", [TRITON, "unreadable"], ids=["numbers", "tensors, as on a GPU"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_small_problem_is_of_the_kind_that_it_stands_for(name, dtype, path):
    sizes, options = KINDS[name]
    case = random_case(0, *sizes).tensors(dtype)
    with forced(path):
        call = build_call(case.q, case.k, case.v, **options)
    classes = {"even": torch.arange(2 * sizes[4]).view(2, sizes[4]) % 2 == 0}
    for extra in (NO_EXTRA, ExtraOutputs(StatsRequest(torch.ones(2, sizes[3], dtype=torch.bool), classes), lse=True)):
        kind = trial.Kind.of(case.q, call, extra, False)
        problem = trial.make_problem(kind)
        q, moved = problem.q.to(dtype), trial._move(problem.call, kind)
        small = ExtraOutputs(problem.request)
        assert trial.Kind.of(q, moved, small, False) == kind


@pytest.mark.parametrize("name", ["decoding", "a bool mask", "everything"])
def test_kernels_pass_their_trials(name):
    sizes, options = KINDS[name]
    case = random_case(0, *sizes).tensors(torch.float32)
    with forced("unreadable"):
        call = build_call(case.q, case.k, case.v, **options)
    assert launch.why_not(case.q, call, ExtraOutputs(StatsRequest(), lse=True)) is None
    assert trial.why_not(case.q, call, backward=True) is None


def test_trials_change_neither_random_numbers_nor_modes():
    case = random_case().tensors(torch.float32)
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    with torch.inference_mode():
        attend(case.q, case.k, case.v)
        assert torch.is_inference_mode_enabled() and not torch.is_grad_enabled()
    assert torch.rand(3).equal(want)


def test_no_trial_is_made_in_an_interpreter_or_on_the_cpu(monkeypatch):
    monkeypatch.undo()
    for interpreting in (False, True):
        monkeypatch.setattr(launch, "interpreting", interpreting)
        assert not trial.is_needed(torch.device("cpu"))
        assert trial.is_needed(torch.device("cuda")) is not interpreting
