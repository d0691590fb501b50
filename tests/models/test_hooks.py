"""Hooks on a model: copies have none, interrupts leave none, threads do not share them, accelerate's stay."""

from __future__ import annotations

import copy
import linecache
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

import headwise
from headwise.errors import HeadwiseError, UnsupportedError
from headwise.models import hooks, passes
from headwise.models.intervene import head_outputs, masking
from headwise.models.watching import registry, watcher
from helpers.model_families import BY_NAME, build
from helpers.model_inputs import inputs

torch.set_num_threads(1)
FAMILY = BY_NAME["llama"]
INPUTS = inputs(FAMILY, "right")
HEADS = {1: [0, 4], 3: [2]}
CONTEXTS: dict[str, Callable[[nn.Module], Any]] = {
    "watch": lambda model: headwise.watch(model, outputs=True),
    "mask": lambda model: headwise.mask_heads(model, HEADS),
    "head_outputs": lambda model: head_outputs.head_outputs(model, lambda site, heads, real: None),
}
EACH_CONTEXT = pytest.mark.parametrize("name", CONTEXTS)


def run(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(**INPUTS)[0]


def hook_count(model: nn.Module) -> int:
    return sum(len(getattr(module, name)) for module in model.modules() for name in hooks.HOOK_TABLES)


def assert_nothing_left(model: nn.Module) -> None:
    assert hook_count(model) == 0
    assert not registry._watched and not registry._uninstall
    assert not hooks._claims and not hooks._uncompiled_for and not hooks._stance
    assert AttentionInterface.get_interface.__module__ != registry.__name__
    assert "__getitem__" not in AttentionMaskInterface.__dict__


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    return build(FAMILY)


@EACH_CONTEXT
def test_a_copy_of_a_model_with_hooks_is_a_plain_model(llama: nn.Module, name: str) -> None:
    plain = run(llama)
    with CONTEXTS[name](llama):
        output = run(llama)
        other = copy.deepcopy(llama)
        assert torch.equal(run(other), plain)
        assert torch.equal(run(llama), output)
        with headwise.mask_heads(other, HEADS), headwise.watch(other) as seen:
            masked = run(other)
    assert torch.equal(run(other), plain) and len(seen.layers) == 4
    assert not torch.equal(masked, plain)
    torch.testing.assert_close(run(headwise.prune_heads(other, HEADS)), masked)
    assert_nothing_left(llama)


def test_a_shallow_copy_shares_the_hooked_modules(llama: nn.Module) -> None:
    with headwise.mask_heads(llama, HEADS):
        assert torch.equal(run(copy.copy(llama)), run(llama))


@pytest.mark.parametrize("name", ["watch", "mask"])
def test_replicas_of_data_parallel_are_refused(llama: Any, name: str) -> None:
    with (
        CONTEXTS[name](llama),
        pytest.raises(UnsupportedError, match="LlamaModel runs as a replica of nn.DataParallel"),
    ):
        run(llama._replicate_for_data_parallel())
    with headwise.mask_heads(llama, HEADS):
        masked = run(llama)
    around = nn.DataParallel(llama, device_ids=[]) if not torch.cuda.is_available() else llama
    with headwise.mask_heads(around, HEADS):
        assert torch.equal(run(around), masked)


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line that runs in headwise's own code, once."""

    FILES = tuple(module.__file__ for module in (hooks, passes, masking, head_outputs, registry, watcher))

    def __init__(self, at: int, skip: tuple[str, ...] = ()) -> None:
        self.remaining, self.skip, self.place = at, skip, ""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in self.FILES or frame.f_code.co_name in self.skip:
            return None
        if event == "line" and "with _" not in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
            self.remaining -= 1
            if self.remaining == 0:
                self.place = f"{frame.f_code.co_name} in line {frame.f_lineno}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def interrupt_each_line(act: Callable[[], Any], skip: tuple[str, ...] = ()) -> Iterator[str]:
    """Act again and again, interrupted one line later each time, until it completes; yields each place."""
    for at in range(1, 2000):
        interrupt, before = Interrupt(at, skip), sys.gettrace()
        sys.settrace(interrupt)
        try:
            act()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        for lock in (hooks._lock, registry._lock):
            # a tracer can raise between the end of a `with` and the release of its lock, where no signal is handled
            while lock._is_owned():  # type: ignore[attr-defined]
                lock.release()
        if not interrupt.place:
            return
        yield interrupt.place
    pytest.fail("it never completed")


@pytest.mark.parametrize("name", ["watch", "mask"])
def test_an_interrupt_while_hooks_are_set_leaves_none(name: str) -> None:
    model = build(BY_NAME["gpt2"])
    contexts: list[Any] = []

    def enter() -> None:
        contexts.append(CONTEXTS[name](model))
        contexts[-1].__enter__()

    places = 0
    for _ in interrupt_each_line(enter, skip=("__init__",)):
        assert_nothing_left(model)
        places += 1
    contexts[-1].__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert places > 20
    assert_nothing_left(model)


@pytest.mark.parametrize("name", ["watch", "mask"])
def test_an_interrupt_while_hooks_are_removed_leaves_none(name: str) -> None:
    model = build(BY_NAME["gpt2"])
    context: list[Any] = []

    def leave() -> None:
        context[-1].__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)

    places = 0
    context.append(CONTEXTS[name](model))
    context[-1].__enter__()
    # the first lines of __exit__ and remove run before anything can catch an interrupt
    for place in interrupt_each_line(leave, skip=("__exit__", "remove")):
        assert hook_count(model) == 0, place
        assert_nothing_left(model)
        context.append(CONTEXTS[name](model))
        context[-1].__enter__()
        places += 1
    assert places > 15
    assert_nothing_left(model)


@pytest.mark.parametrize("method", ["register_forward_pre_hook", "register_forward_hook"])
@EACH_CONTEXT
def test_a_hook_that_cannot_be_set_leaves_none(name: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(BY_NAME["gpt2"])
    plain, calls = getattr(nn.Module, method), [0]
    for at in range(1, 100):
        calls[0] = 0

        def register(self: nn.Module, *args: Any, at: int = at, **options: Any) -> Any:
            calls[0] += 1
            handle = plain(self, *args, **options)
            if calls[0] == at:
                raise KeyboardInterrupt
            return handle

        monkeypatch.setattr(nn.Module, method, register)
        try:
            with CONTEXTS[name](model):
                model(input_ids=INPUTS["input_ids"])
        except KeyboardInterrupt:
            pass
        else:
            break
        assert_nothing_left(model)
    assert at > 1
    assert_nothing_left(model)


def in_thread(act: Callable[[], Any]) -> list[BaseException]:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            act()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="other", daemon=True)
    thread.start()
    thread.join(60)
    return errors


@pytest.mark.parametrize("second", ["watch", "mask"])
@pytest.mark.parametrize("first", ["watch", "mask"])
def test_a_second_thread_is_refused_on_the_same_model(llama: nn.Module, first: str, second: str) -> None:
    def enter() -> None:
        with CONTEXTS[second](llama):
            run(llama)

    with CONTEXTS[first](llama):
        run(llama)
        (error,) = in_thread(enter)
        assert isinstance(error, HeadwiseError)
        assert str(error).startswith(f"cannot {second} LlamaModel here: thread 'MainThread' has a headwise.{first}")
        run(llama)
    assert in_thread(enter) == []  # in turn
    assert_nothing_left(llama)


def test_another_thread_may_run_the_model_but_not_at_the_same_time(llama: Any) -> None:
    errors: list[BaseException] = []
    hook = llama.layers[2].register_forward_pre_hook(lambda *_: errors.extend(in_thread(lambda: run(llama))))
    with headwise.watch(llama):
        run(llama)
    hook.remove()
    assert "threads 'MainThread' and 'other' run LlamaModel at once while it is watched" in str(errors[0])
    with headwise.watch(llama) as seen:
        assert in_thread(lambda: run(llama)) == []
    assert len(seen.layers) == 4
    assert_nothing_left(llama)


def test_several_threads_run_one_masked_model(llama: nn.Module) -> None:
    with headwise.mask_heads(llama, HEADS):
        masked = run(llama)
        together: list[Tensor] = []
        threads = [threading.Thread(target=lambda: together.append(run(llama))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert len(together) == 3 and all(torch.equal(x, masked) for x in together)


@pytest.mark.parametrize("way", ["cpu_offload", "disk_offload", "dispatch_model"])
def test_offloaded_models_are_watched_and_masked(way: str, tmp_path: Path) -> None:
    plain, model = (build(FAMILY, auto=AutoModelForCausalLM) for _ in range(2))
    if way == "cpu_offload":
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    elif way == "disk_offload":
        accelerate.disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    else:
        accelerate.dispatch_model(model, {"": "cpu"}, main_device="cpu", force_hooks=True)
    outputs, seen = [], []
    for variant in (plain, model):
        with headwise.mask_heads(variant, HEADS):
            outputs.append(run(variant))
        with headwise.watch(variant, weights=True) as watching:
            run(variant)
        seen.append(watching)
    assert torch.equal(*outputs) and not torch.equal(outputs[1], run(model))
    for a, b in zip(seen[0].layers, seen[1].layers, strict=True):
        assert a.stats == b.stats and torch.equal(a.weights, b.weights)
    michel = [torch.as_tensor(headwise.importance(variant, [INPUTS], "michel")["self"]) for variant in (plain, model)]
    torch.testing.assert_close(*michel)


def test_nested_watches_and_masks_see_each_other(llama: nn.Module) -> None:
    with headwise.mask_heads(llama, HEADS), headwise.watch(llama) as expected:
        masked = run(llama)
    with headwise.watch(llama) as outer, headwise.mask_heads(llama, HEADS), headwise.watch(llama) as inner:
        assert torch.equal(run(llama), masked)
    for a, b, c in zip(outer.layers, inner.layers, expected.layers, strict=True):
        assert a.stats == b.stats == c.stats

    def steps() -> Iterator[Tensor]:
        with headwise.mask_heads(llama, HEADS):
            while True:
                yield run(llama)

    generator = steps()
    assert torch.equal(next(generator), masked) and torch.equal(run(llama), masked)
    generator.close()
    assert not torch.equal(run(llama), masked)
    assert_nothing_left(llama)


def test_a_pass_that_raises_does_not_affect_the_next(llama: Any) -> None:
    with headwise.watch(llama) as undisturbed:
        run(llama)
    hook = llama.layers[2].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with headwise.watch(llama) as seen, headwise.mask_heads(llama, {0: []}):
        with pytest.raises(ZeroDivisionError):
            run(llama)
        hook.remove()
        run(llama)
    assert [len(layer.stats.count) // 3 for layer in seen.layers] == [2, 2, 2, 1]  # runs of three sequences
    assert seen[3].stats == undisturbed[3].stats
    assert_nothing_left(llama)
