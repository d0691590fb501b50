"""Random attention calls: valid ones equal the specification on every path, invalid ones are refused in words."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from campaigns import Report
from headwise import attend, explain, head_stats, reference, weights
from headwise.errors import HeadwiseError
from helpers.attention_cases import NATIVE, PATHS, READABLE, AttentionCase, forced

SHORT, LONG = 200, 40_000
DTYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)
Rng = np.random.Generator


def campaign(tries: int, seed: int) -> Report:
    """Half of the tries are valid calls, half invalid ones; every try has a seed of its own."""
    report = Report()
    for number in range(tries):
        call_seed = seed * 1_000_003 + number
        rng = np.random.default_rng(call_seed)
        attempt = _valid if number % 2 else _invalid
        report.tries += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrong = attempt(rng, report)
        if wrong:
            report.failures.append(f"{attempt.__name__[1:]} call, default_rng({call_seed}): {wrong}")
    return report


# ---- valid calls ----


def random_call(rng: Rng) -> AttentionCase:
    """Any sizes, values of any moderate size, any options together."""
    batch, kv, group = (int(n) for n in rng.integers(1, 4, 3))
    keys = int(rng.choice([0, 1, 2, 5, 13, 17, 31, 64, 67, 131]))
    queries = keys if rng.random() < 0.5 else int(rng.choice([0, 1, 3, 7, 19, 37]))
    dim, width = (int(rng.choice([1, 2, 3, 5, 8, 16, 19, 64])) for _ in range(2))
    heads = kv * group
    shapes = (batch, heads, queries, dim), (batch, kv, keys, dim), (batch, kv, keys, width)
    q, k, v = (rng.normal(size=shape) * rng.choice([0.1, 1.0, 3.0]) for shape in shapes)
    possible: dict[str, Callable[[], Any]] = {
        "mask": lambda: random_mask(rng, (batch, heads, queries, keys)),
        "causal": lambda: True,
        "window": lambda: tuple(None if rng.random() < 0.3 else int(rng.integers(0, 40)) for _ in range(2)),
        "lengths": lambda: rng.integers(0, keys + 1, batch),
        "offset": lambda: int(rng.integers(-9, 40)) if rng.random() < 0.5 else rng.integers(-9, 40, batch),
        "scale": lambda: float(rng.choice([0.125, 1.0, -0.5])),
        "softcap": lambda: float(rng.choice([0.75, 2.0, 50.0])),
        "sinks": lambda: rng.normal(size=heads),
        "gates": lambda: rng.normal(size=heads if rng.random() < 0.5 else (batch, heads)),
    }
    options = {name: make() for name, make in possible.items() if rng.random() < 0.25}
    stats_options: dict[str, Any] = {}
    if rng.random() < 0.4:
        stats_options["queries"] = rng.random((batch, queries)) < 0.7
    if rng.random() < 0.3:
        stats_options["classes"] = {name: rng.random((batch, keys)) < 0.4 for name in ("rare", "first")}
    if rng.random() < 0.3:
        stats_options["cross"] = True
    return AttentionCase(q, k, v, options, stats_options)


def random_mask(rng: Rng, full: tuple[int, ...]) -> np.ndarray:
    shape = tuple(n if rng.random() < 0.6 else 1 for n in full)[int(rng.integers(0, 4)) :]
    if rng.random() < 0.5:
        return rng.random(shape) < rng.choice([0.0, 0.3, 0.7, 1.0])
    return np.where(rng.random(shape) < rng.choice([0.0, 0.4]), -np.inf, rng.normal(size=shape))


def _spaced(x: Tensor) -> Tensor:
    """Every other element of a tensor whose others are NaN, begun at an offset."""
    room = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 1), math.nan)
    room[..., 1::2] = x
    return room[..., 1::2]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "tokens before heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "width before tokens": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "batch last": lambda x: x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    "spaced": _spaced,
    "negated": lambda x: torch._neg_view(-x),
}


def expand_head_or_sequence(rng: Rng, call: AttentionCase) -> AttentionCase:
    """Now and then one head or one sequence stands for all, by a stride of 0."""
    if rng.random() > 0.2:
        return call
    axis = int(rng.integers(0, 2))
    arrays = [np.repeat(x.take([0], axis), x.shape[axis], axis) for x in (call.q, call.k, call.v)]
    return AttentionCase(*arrays, options=call.options, stats_options=call.stats_options)


def _zero_strided(x: Tensor) -> Tensor:
    """Equal along an axis: the same by a stride of 0."""
    for axis in (0, 1):
        first = x.narrow(axis, 0, 1)
        if x.shape[axis] > 1 and torch.equal(x, first.expand_as(x)):
            return first.expand_as(x)
    return x


def _valid(rng: Rng, report: Report) -> str | None:
    dtype = DTYPES[rng.integers(len(DTYPES))]
    call = expand_head_or_sequence(rng, random_call(rng)).rounded(dtype)
    arguments = call.tensors(dtype)
    path = str(rng.choice([*PATHS, *NATIVE, *NATIVE]))
    lay = LAYOUTS[str(rng.choice(list(LAYOUTS)))]
    q, k, v = (_zero_strided(lay(x)) for x in (arguments.q, arguments.k, arguments.v))
    learning = bool(rng.random() < 0.2)
    mark = f"{path}, {dtype}, {list(call.options)}, q {tuple(q.shape)}, k {tuple(k.shape)}"
    try:
        want, stats = reference.head_stats(call.q, call.k, call.v, **call.options, **call.stats_options)
        want_weights = reference.weights(call.q, call.k, **call.weight_options)
        with forced(path):
            explain(q, k, v, **arguments.options)
            out = attend(q, k, v, **arguments.options)
            stats_output, got_stats = head_stats(q, k, v, **arguments.options, **arguments.stats_options)
            got_weights = weights(q, k, **arguments.weight_options)
            slope = gradient(q, k, v, arguments.options) if learning else None
        exact = exact_gradient(call) if learning else None
    except Exception as error:
        return f"{type(error).__name__}: {error} ({mark})"
    report.count("equal to the specification")
    bounds = Bounds(call, dtype)
    return (
        differ("attend", out, want, bounds.output, mark)
        or differ("head_stats", stats_output, want, bounds.output, mark)
        or differ("weights", got_weights, want_weights, bounds.weight, mark)
        or differ("count", got_stats.count, stats.count, 0.0, mark)
        or next(
            filter(None, (differ(n, got_stats.sums[n], x, bounds.sums(n), mark) for n, x in stats.sums.items())), None
        )
        or next(
            filter(None, (differ(n, got_stats.maxima[n], x, bounds.logit, mark) for n, x in stats.maxima.items())), None
        )
        or (None if slope is None or exact is None else differ("gradient", slope, exact, bounds.gradient, mark))
    )


def gradient(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    """Of the sum of all outputs, by the queries."""
    q = q.detach().requires_grad_()
    return torch.autograd.grad(attend(q, k, v, **options).sum(), q)[0]


def exact_gradient(call: AttentionCase) -> np.ndarray:
    """The same in float64, by operators of PyTorch's that have every derivative."""
    arguments = call.tensors(torch.float64)
    with forced("one block of rows"):
        result: np.ndarray = gradient(arguments.q, arguments.k, arguments.v, arguments.options).numpy()
    return result


class Bounds:
    """How far a result may be off: by rounding of sums and scores, which scales with them and with their number."""

    def __init__(self, call: AttentionCase, dtype: torch.dtype):
        sums = torch.float64 if dtype == torch.float64 else torch.float32
        largest = [float(abs(x).max(initial=0.0)) for x in (call.q, call.k, call.v)]
        dim, keys, queries = call.q.shape[3], call.k.shape[2], call.q.shape[2]
        scale = abs(call.options.get("scale", dim**-0.5))
        score = largest[0] * largest[1] * dim * scale + 10.0
        weight_error = 8 * torch.finfo(sums).eps * (score + math.sqrt(keys + dim))  # relative, of a weight
        if dtype != sums:
            weight_error += 2 * torch.finfo(dtype).eps  # the result is rounded to it
        gates = float(abs(np.asarray(call.options.get("gates", 1.0))).max(initial=0.0))
        self.weight = weight_error
        self.logit = 8 * torch.finfo(sums).eps * score * math.sqrt(dim)
        self.output = weight_error * (largest[2] + 1e-3) * max(1.0, gates) * 2
        self.gradient = 8 * self.output * call.v.shape[3] * scale * (largest[1] + 1e-3) * max(1.0, math.sqrt(keys))
        self._sum_error, self._far = weight_error * max(1, queries), keys + queries + 50

    def sums(self, name: str) -> float:
        return self._sum_error * (self._far if name == "distance" else 8.0)


def differ(name: str, got: Tensor, want: np.ndarray, bound: float, mark: str) -> str | None:
    values = got.detach().double().numpy()
    if values.shape != want.shape:
        return f"{name} has shape {values.shape}, the specification {want.shape} ({mark})"
    if not np.array_equal(np.isnan(values), np.isnan(want)):
        return f"{name} is NaN at other places ({mark})"
    distance = float(np.nanmax(abs(np.where(values == want, 0.0, values - want)), initial=0.0))  # both may be -inf
    return f"{name} is off by {distance:.2g}, more than {bound:.2g} ({mark})" if distance > bound else None


# ---- invalid calls ----

Arguments = dict[str, Any]


def one_of(rng: Rng, *choices: Any) -> Any:
    return choices[rng.integers(len(choices))]


def _larger_shape(shape: tuple[int, ...], rng: Rng) -> tuple[int, ...]:
    """A shape that is larger in one of the given one's axes by one, two or three."""
    axis = int(rng.integers(len(shape)))
    return tuple(n + int(rng.integers(1, 4)) if i == axis else n for i, n in enumerate(shape))


INVALID: dict[str, Callable[[Rng, Arguments], Arguments]] = {
    "k of another width": lambda rng, x: {"k": torch.zeros(*x["k"].shape[:3], x["k"].shape[3] + 1)},
    "k of another batch": lambda rng, x: {"k": torch.zeros(x["k"].shape[0] + 1, *x["k"].shape[1:])},
    "v of other keys": lambda rng, x: {"v": torch.zeros(*x["v"].shape[:2], x["v"].shape[2] + 2, x["v"].shape[3])},
    "q of three axes": lambda rng, x: {"q": x["q"][0]},
    "v of five axes": lambda rng, x: {"v": x["v"][None]},
    "no heads": lambda rng, x: {"q": x["q"][:, :0]},
    "no width": lambda rng, x: {"q": x["q"][..., :0], "k": x["k"][..., :0]},
    "heads that do not divide": lambda rng, x: {
        "q": torch.zeros(x["q"].shape[0], x["k"].shape[1] * 2 + 1, *x["q"].shape[2:]),
        "k": x["k"].repeat(1, 2, 1, 1),
        "v": x["v"].repeat(1, 2, 1, 1),
    },
    "another dtype": lambda rng, x: {"k": x["k"].double()},
    "integers": lambda rng, x: {name: x[name].int() for name in "qkv"},
    "complex": lambda rng, x: {name: x[name].to(torch.complex64) for name in "qkv"},
    "8 bits": lambda rng, x: {name: x[name].to(torch.float8_e4m3fn) for name in "qkv"},
    "another device": lambda rng, x: {str(rng.choice(list("qkv"))): torch.zeros(1, device="meta")},
    "k on another device": lambda rng, x: {"k": x["k"].to("meta")},
    "no tensor": lambda rng, x: {
        str(rng.choice(list("qkv"))): one_of(rng, None, 1.0, "q", [1.0], np.zeros((2, 2, 2, 2)), object())
    },
    "sparse": lambda rng, x: {str(rng.choice(list("qkv"))): x["q"].to_sparse()},
    "nested": lambda rng, x: {"q": torch.nested.nested_tensor(list(x["q"]))},
    "mask that does not broadcast": lambda rng, x: {
        "mask": torch.ones(
            _larger_shape((x["q"].shape[0] + 1, x["q"].shape[1] + 1, x["q"].shape[2] + 1, x["k"].shape[2] + 1), rng),
            dtype=torch.bool,
        )
    },
    "mask of integers": lambda rng, x: {
        "mask": torch.ones(1, 1, 1, x["k"].shape[2], dtype=one_of(rng, torch.uint8, torch.int64, torch.complex64))
    },
    "mask of five axes": lambda rng, x: {"mask": torch.ones(1, 1, 1, 1, 1, dtype=torch.bool)},
    "mask no tensor": lambda rng, x: {"mask": one_of(rng, [True], "mask", 1)},
    "mask on another device": lambda rng, x: {"mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device="meta")},
    "window": lambda rng, x: {
        "window": one_of(
            rng, 3, (1,), (1, 2, 3), (-1, 0), (0, -2), (1.5, 0), ("a", 0), (True, 0), "ab", {}, (math.nan, 0)
        )
    },
    "causal": lambda rng, x: {"causal": one_of(rng, None, "yes", 1.0, torch.tensor([True, False]), [])},
    "lengths too long": lambda rng, x: {
        "lengths": torch.full(x["q"].shape[:1], x["k"].shape[2] + int(rng.integers(1, 9)))
    },
    "lengths below 0": lambda rng, x: {"lengths": torch.full(x["q"].shape[:1], -int(rng.integers(1, 9)))},
    "lengths of another shape": lambda rng, x: {"lengths": torch.zeros(x["q"].shape[0] + 1, dtype=torch.long)},
    "lengths not whole": lambda rng, x: {
        "lengths": torch.zeros(x["q"].shape[:1], dtype=one_of(rng, torch.float32, torch.bool))
    },
    "lengths no tensor": lambda rng, x: {"lengths": one_of(rng, [1], 3, "x", (1, 2))},
    "offset": lambda rng, x: {
        "offset": one_of(
            rng,
            1.5,
            "0",
            True,
            [1],
            math.nan,
            torch.zeros(x["q"].shape[0] + 1, dtype=torch.long),
            torch.zeros(x["q"].shape[0]),
        )
    },
    "scale": lambda rng, x: {"scale": one_of(rng, math.nan, math.inf, -math.inf, "1", [1], 1j, 10**400)},
    "softcap": lambda rng, x: {"softcap": one_of(rng, 0.0, -1.0, math.nan, math.inf, "1", [1], 1j)},
    "dropout": lambda rng, x: {"dropout": one_of(rng, -0.1, 1.5, math.nan, "1", [1])},
    "sinks of another shape": lambda rng, x: {"sinks": torch.zeros(x["q"].shape[1] + 1)},
    "sinks no tensor": lambda rng, x: {"sinks": one_of(rng, 1.0, [0.0], "s")},
    "sinks not numbers": lambda rng, x: {
        "sinks": torch.zeros(x["q"].shape[1], dtype=one_of(rng, torch.bool, torch.complex64))
    },
    "gates of another shape": lambda rng, x: {"gates": torch.zeros(x["q"].shape[0] + 1, x["q"].shape[1])},
    "gates on another device": lambda rng, x: {"gates": torch.zeros(x["q"].shape[1], device="meta")},
}
INVALID_STATS: dict[str, Callable[[Rng, Arguments], Arguments]] = {
    "queries of another shape": lambda rng, x: {
        "queries": torch.ones(x["q"].shape[0], x["q"].shape[2] + 1, dtype=torch.bool)
    },
    "queries not bool": lambda rng, x: {"queries": torch.ones(x["q"].shape[0], x["q"].shape[2])},
    "queries no tensor": lambda rng, x: {"queries": one_of(rng, [True], "q", 1)},
    "classes of another shape": lambda rng, x: {
        "classes": {"a": torch.ones(x["q"].shape[0], x["k"].shape[2] + 1, dtype=torch.bool)}
    },
    "classes not bool": lambda rng, x: {"classes": {"a": torch.ones(x["q"].shape[0], x["k"].shape[2])}},
    "classes no dict": lambda rng, x: {"classes": one_of(rng, ["a"], "a", 1)},
    "classes no tensors": lambda rng, x: {"classes": {"a": [True]}},
}
UNKNOWN = ("casual", "masks", "windows", "lenghts", "is_causal", "attn_mask", "")


def _invalid(rng: Rng, report: Report) -> str | None:
    size = [int(n) for n in rng.integers(1, 5, 3)]
    keys, queries, dim = int(rng.integers(1, 20)), int(rng.integers(1, 9)), int(rng.integers(1, 9))
    heads = size[1] * size[2]
    arguments: Arguments = {
        "q": torch.ones(size[0], heads, queries, dim),
        "k": torch.ones(size[0], size[1], keys, dim),
        "v": torch.ones(size[0], size[1], keys, dim),
    }
    if rng.random() < 0.5:  # the path of calls like an earlier one must refuse as well
        for _ in range(3):
            attend(**arguments)
    with_stats = bool(rng.random() < 0.3)
    table = {**INVALID, **INVALID_STATS} if with_stats else INVALID
    name = str(rng.choice(list(table)))
    call: Callable[..., Any] = head_stats if with_stats else one_of(rng, attend, explain, head_stats)
    unknown = rng.random() < 0.03
    wrong: Arguments = {str(rng.choice(UNKNOWN)): True} if unknown else table[name](rng, arguments)
    if rng.random() < 0.3 and "causal" not in wrong:
        wrong["causal"] = True
    path = str(rng.choice([*READABLE, *NATIVE, *NATIVE]))  # in a graph no value can be looked at
    values = {**arguments, **wrong}
    q, k, v = (values.pop(x) for x in "qkv")
    try:
        with forced(path):
            call(q, k, v, **values)
    except HeadwiseError as error:
        report.count("refused")
        return None if "\n" not in str(error) and str(error) else f"{name}: the message is not one line: {error}"
    except TypeError as error:
        if unknown and "unexpected keyword" in str(error):
            report.count("refused")
            return None
        return f"{name} in {call.__name__}: TypeError: {error}"
    except Exception as error:
        return f"{name} in {call.__name__} ({path}): {type(error).__name__}: {error}"
    accepted = {key: x for key, x in wrong.items() if not isinstance(x, Tensor)}
    return f"{name} in {call.__name__} ({path}) was taken: {accepted}"
