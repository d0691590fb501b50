"""Caches: decoding in any pieces gives what one call gives, and a call that fails leaves a cache as it was."""

import contextlib
import copy
import pickle

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from headwise import Alibi, KVCache, MemoryCache, MultiHeadAttention, Rotary, SlidingCache, StaticCache
from headwise.errors import CacheError, HeadwiseError, MaskError, ShapeError

BATCH, TOKENS, WIDTH, WINDOW = 3, 11, 24, 4
CACHES = {"growing": KVCache, "static": lambda: StaticCache(TOKENS + 2), "sliding": lambda: SlidingCache(WINDOW)}
POSITIONS = {"no position": None, "rotary": Rotary(base=50.0), "alibi": Alibi()}
OPTIONS = {
    "plain": {},
    "grouped": {"num_kv_heads": 2},
    "multi-query, softcap": {"num_kv_heads": 1, "softcap": 1.5},
    "grouped, sinks, normed": {"num_kv_heads": 3, "sinks": True, "qk_norm": "rms"},
}
CHUNKS = {"token by token": [1] * 11, "in chunks": [4, 1, 3, 2, 1], "a prompt first": [9, 1, 1], "at once": [11]}
either = pytest.mark.parametrize
every_position = either("position", POSITIONS.values(), ids=POSITIONS)
every_cache = either("new_cache", CACHES.values(), ids=CACHES)
every_chunking = either("chunks", CHUNKS.values(), ids=CHUNKS)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def made(num_heads: int = 6, **options) -> MultiHeadAttention:
    """In eval mode, every parameter random."""
    module = MultiHeadAttention(WIDTH, num_heads, **{"dtype": torch.float64, **options})
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module.eval()


def tokens(count: int = TOKENS, batch: int = BATCH) -> torch.Tensor:
    return torch.randn(batch, count, WIDTH, dtype=torch.float64)


def decode(module, x, cache, chunks, **call_options) -> torch.Tensor:
    """The outputs of x (B, T, d), given to a cache in pieces of these sizes."""
    return torch.cat([module(piece, causal=True, cache=cache, **call_options) for piece in x.split(chunks, 1)], 1)


def close(got, want, atol: float = 1e-10) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=atol)


def capacity(cache: KVCache) -> int:
    """The number of tokens for which a cache has memory."""
    tensors = [x for x in vars(cache).values() if isinstance(x, torch.Tensor) and x.dim() == 4]
    return max(x.untyped_storage().nbytes() // (x.element_size() * x[:, :, :1].numel() or 1) for x in tensors)


@every_chunking
@either("options", OPTIONS.values(), ids=OPTIONS)
@every_position
@either("window", [None, WINDOW])
@every_cache
def test_cached_decoding_equals_one_call(new_cache, window, position, options, chunks):
    module, x = made(position=position, **options), tokens()
    if window is None and isinstance(new_cache(), SlidingCache):
        window = WINDOW - 1  # it cannot see more than it keeps, but less
    call_options = {} if window is None else {"window": (window - 1, 0)}
    want = module(x, causal=True, **call_options)
    close(module.train()(x, causal=True, **call_options), want)
    module.eval()
    cache = new_cache()
    close(decode(module, x, cache, chunks, **call_options), want)
    assert cache.length == TOKENS
    with torch.no_grad():
        close(decode(module, x, new_cache(), chunks, **call_options), want)
    with torch.inference_mode():
        close(decode(module, x, new_cache(), chunks, **call_options).clone(), want)


def test_a_sliding_cache_implies_its_window():
    module, x = made(position=Rotary()), tokens()
    narrow = module(x, causal=True, window=(1, 0))
    close(decode(module, x, SlidingCache(WINDOW), [3, 5, 3]), module(x, causal=True, window=(WINDOW - 1, 0)))
    close(decode(module, x, SlidingCache(WINDOW), [3, 5, 3], window=(1, 0)), narrow)
    close(decode(module, x, SlidingCache(2), [1] * TOKENS), narrow)
    close(decode(module, x, SlidingCache(1), [2, 9]), module(x, causal=True, window=(0, 0)))


@either("new_cache", [KVCache, lambda: StaticCache(TOKENS)], ids=["growing", "static"])
@every_chunking
def test_cached_decoding_with_windows_per_head_equals_one_call(new_cache, chunks):
    module, x = made(position=Rotary()), tokens()
    call_options = {"window": [(1, 0), (2, 0), (None, 0)] * 2, "keep_first": [2, 0, 0, 1, 3, 0]}
    close(decode(module, x, new_cache(), chunks, **call_options), module(x, causal=True, **call_options))


@either("new_cache", [KVCache, lambda: StaticCache(200)], ids=["growing", "static"])
@either("chunks", [[1] * 200, [63, 1, 1, 64, 71], [200]], ids=["token by token", "in chunks", "at once"])
def test_long_decoding_equals_one_call(new_cache, chunks):
    """Past the room that a growing cache begins with, and past its doublings: earlier keys stay."""
    module, x = made(num_kv_heads=2, position=Rotary()), tokens(200, 2)
    with torch.no_grad():
        close(decode(module, x, new_cache(), chunks), module(x, causal=True))


@torch.no_grad()
def test_caches_allocate_as_little_as_they_promise():
    """A static cache takes it once, a growing one now and then, a sliding one no more than it needs."""
    module, x = made(num_kv_heads=2), tokens(300, 1)
    places = {"growing": set(), "static": set()}
    caches = {"growing": KVCache(), "static": StaticCache(300), "sliding": SlidingCache(8)}
    for piece in x.split(1, 1):
        for name, cache in caches.items():
            module(piece, causal=True, cache=cache)
            if name in places:
                places[name].add(next(t for t in vars(cache).values() if isinstance(t, torch.Tensor)).data_ptr())
        assert capacity(caches["sliding"]) <= 16
    assert len(places["static"]) == 1 and capacity(caches["static"]) == 301  # one slot stays empty
    assert len(places["growing"]) <= 5 and capacity(caches["growing"]) <= 600
    for prompt in (5, 9, 17, 300):
        cache = SlidingCache(8)
        module(x[:, :prompt], causal=True, cache=cache)
        assert capacity(cache) <= 24, "the prompt is kept whole"
        assert cache.length == prompt


@every_position
@either("options", [{}, {"num_kv_heads": 2, "sinks": True}, {"num_kv_heads": 1, "softcap": 2.0}], ids=str)
@either("window", [None, (2, 0)])
@either("new_cache", [KVCache, lambda: StaticCache(20)], ids=["growing", "static"])
def test_sequences_of_different_lengths_decode_as_if_alone(new_cache, window, options, position):
    """Ragged prompts, then single tokens, a chunk, and a ragged chunk: as if each sequence ran alone."""
    module = made(position=position, **options)
    calls = [(6, [6, 2, 4]), (1, None), (1, None), (3, None), (4, [2, 4, 0]), (1, None)]  # tokens, those that are real
    texts: list[list[torch.Tensor]] = [[], [], []]
    got: list[list[torch.Tensor]] = [[], [], []]
    cache = new_cache()
    for count, real in calls:
        x = tokens(count)
        real = [count] * BATCH if real is None else real
        lengths = torch.tensor([sum(map(len, texts[b])) + real[b] for b in range(BATCH)])
        given = {} if real == [count] * BATCH else {"lengths": lengths}
        out = module(x, causal=True, window=window, cache=cache, **given)
        assert cache.length == int(lengths.max())
        for b in range(BATCH):
            texts[b].append(x[b, : real[b]])
            got[b].append(out[b, : real[b]])
    for b in range(BATCH):
        alone = torch.cat(texts[b])[None]
        close(torch.cat(got[b])[None], module(alone, causal=True, window=window))


def test_lengths_of_the_caller_are_not_modified():
    """A caller may count up the tensor that was given."""
    module, x = made(position=Rotary()), tokens(6)
    lengths, cache = torch.tensor([3, 1, 2]), KVCache()
    module(x[:, :3], causal=True, cache=cache, lengths=lengths)
    out = []
    for t in (3, 4, 5):
        lengths += 1
        out.append(module(x[:, t : t + 1], causal=True, cache=cache, lengths=lengths))
    assert lengths.tolist() == [6, 4, 5]
    for b, first in enumerate((3, 1, 2)):
        alone = torch.cat([x[b : b + 1, :first], x[b : b + 1, 3:]], 1)
        close(torch.cat(out, 1)[b : b + 1], module(alone, causal=True)[:, first:])


@every_chunking
@every_cache
def test_weights_and_gates_with_a_cache(new_cache, chunks):
    module, x = made(num_kv_heads=2, position=Rotary()), tokens()
    sliding = isinstance(new_cache(), SlidingCache)
    call_options = {"window": (WINDOW - 1, 0)} if sliding else {}
    gates = torch.randn(6, dtype=torch.float64)
    want, whole = module(x, causal=True, gates=gates, need_weights=True, **call_options)
    cache, done = new_cache(), 0
    for piece in x.split(chunks, 1):
        out, a = module(piece, causal=True, gates=gates, need_weights=True, cache=cache)
        rows = slice(done, done := done + piece.shape[1])
        close(out, want[:, rows])
        close(a, whole[:, :, rows, :done][..., -a.shape[-1] :])  # a sliding cache shows the last keys
        assert a.shape[-1] == (done if not sliding else min(rows.start, WINDOW - 1) + piece.shape[1])


def test_masks_cover_cached_and_new_keys():
    module, x = made(num_kv_heads=2), tokens()
    mask = torch.rand(BATCH, 1, TOKENS, TOKENS) > 0.3
    want = module(x, causal=True, mask=mask)
    cache = KVCache()
    for first, stop in ((0, 5), (5, 6), (6, 11)):
        out = module(x[:, first:stop], causal=True, mask=mask[:, :, first:stop, :stop], cache=cache)
        close(out, want[:, first:stop])


def test_stats_of_decoding_steps_add_up_to_those_of_one_call():
    module, x = made(num_kv_heads=2, position=Rotary(), sinks=True), tokens()
    cache = KVCache()
    steps = [module.stats(piece, causal=True, cache=cache) for piece in x.split([4, 1, 6], 1)]
    together, want = steps[0].continued(steps[1]).continued(steps[2]), module.stats(x, causal=True)
    for name in want.names:
        close(together[name], want[name])


@every_cache
def test_weights_does_not_change_a_cache(new_cache):
    """weights() with a cache shows the next tokens' weights, or is refused; the outputs after it are right."""
    module, x = made(position=Rotary()), tokens()
    window = (WINDOW - 1, 0) if isinstance(new_cache(), SlidingCache) else None
    want = module(x, causal=True, window=window)
    cache = new_cache()
    module(x[:, :5], causal=True, cache=cache)
    with contextlib.suppress(HeadwiseError, TypeError):
        module.weights(x[:, 5:7], causal=True, cache=cache)
    done = cache.length  # whether they count as seen or not
    assert done in (5, 7)
    close(module(x[:, done:], causal=True, cache=cache), want[:, done:])


@either("chunks", [[1] * 5, [3, 2], [5]], ids=str)
@either(
    "call_options",
    [{}, {"lengths": torch.tensor([7, 2, 5])}, {"mask": torch.rand(BATCH, 1, 1, 7) > 0.4}],
    ids=["", "l", "m"],
)
@either("options", [{}, {"num_kv_heads": 2, "kdim": 5, "vdim": 5}, {"qk_norm": "layer", "sinks": True}], ids=str)
def test_memory_cache_projects_the_memory_once(options, call_options, chunks):
    module, x = made(**options), tokens(5)
    memory = torch.randn(BATCH, 7, module.kdim, dtype=torch.float64)
    want = module(x, memory, **call_options)
    calls = {"W_K": 0, "W_V": 0, "W_Q": 0}

    def count(name):
        def hook(*_):
            calls[name] += 1

        return hook

    for name in calls:
        getattr(module, name).register_forward_hook(count(name))
    cache = MemoryCache()
    assert cache.memory is None and cache.length == 0
    out = torch.cat([module(piece, memory, cache=cache, **call_options) for piece in x.split(chunks, 1)], 1)
    close(out, want)
    assert calls == {"W_K": 1, "W_V": 1, "W_Q": len(chunks)}
    assert cache.length == 7
    cache.reset()
    other = torch.randn_like(memory)
    close(module(x, other, cache=cache), module(x, other))
    assert cache.memory is not None


OTHER_MEMORIES = {
    "other values": lambda memory: (memory + 1,),
    "other values of one sequence": lambda memory: (torch.cat([memory[:2], memory[1:2]]),),
    "another value argument": lambda memory: (memory, memory + 1),
    "changed in place": lambda memory: (memory.add_(1),),
}


@either("other", list(OTHER_MEMORIES))
def test_a_memory_cache_refuses_another_memory_of_the_same_size(other):
    module, x, memory, cache = made(), tokens(4), tokens(7), MemoryCache()
    module(x, memory, cache=cache)
    inputs = OTHER_MEMORIES[other](memory)
    with pytest.raises(CacheError, match="another memory of this size.*; .reset\\(\\) it first"):
        module(x, *inputs, cache=cache)
    cache.reset()
    close(module(x, *inputs, cache=cache), module(x, *inputs))


@either("inference", [False, True])
def test_a_memory_cache_recognises_its_memory_in_other_tensors(inference):
    with torch.inference_mode() if inference else torch.no_grad():
        module, x, memory, cache = made(), tokens(4), tokens(7), MemoryCache()
        memory[0, 2, 1] = torch.nan  # a padding token may hold anything
        lengths = torch.tensor([2, 7, 7])
        want = module(x, memory, lengths=lengths)
        for same in (memory, memory[:], memory.clone(), memory.transpose(0, 1).contiguous().transpose(0, 1)):
            close(module(x, same, same, cache=cache, lengths=lengths), want)
        close(module(x, memory, cache=copy.deepcopy(cache), lengths=lengths), want)


def test_memory_cache_with_rotary_positions():
    """Cross-attention cannot count the queries it has seen; positions say where they stand."""
    module, x, memory, cache = made(position=Rotary(base=20.0)), tokens(5), tokens(7), MemoryCache()
    steps = [module(x[:, t : t + 1], memory, cache=cache, positions=torch.tensor([t])) for t in range(5)]
    close(torch.cat(steps, 1), module(x, memory))


@every_cache
@every_position
@either("chunks", [[1] * TOKENS, [4, 1, 3, 2, 1], [TOKENS]], ids=str)
def test_gradients_through_a_cache(new_cache, position, chunks):
    module, x = made(num_kv_heads=2, position=position), tokens().requires_grad_()
    window = (WINDOW - 1, 0) if isinstance(new_cache(), SlidingCache) else None
    wanted = [x, *module.parameters()]
    want = torch.autograd.grad(module(x, causal=True, window=window).square().sum(), wanted)
    got = torch.autograd.grad(decode(module, x, new_cache(), chunks).square().sum(), wanted)
    for g, w in zip(got, want, strict=True):
        close(g, w)


def test_gradients_through_ragged_and_memory_caches():
    module, x, memory = made(num_kv_heads=2, position=Rotary()), tokens(5).requires_grad_(), tokens(7)
    lengths, cache = torch.tensor([3, 1, 2]), KVCache()
    first = module(x[:, :3], causal=True, cache=cache, lengths=lengths)
    out = module(x[:, 3:], causal=True, cache=cache)
    real = torch.arange(3) < lengths[:, None]
    got = torch.autograd.grad(first[real].square().sum() + out.square().sum(), x)[0]
    loss = 0
    for b, n in enumerate(lengths.tolist()):
        loss = loss + module(torch.cat([x[b : b + 1, :n], x[b : b + 1, 3:]], 1), causal=True).square().sum()
    close(got, torch.autograd.grad(loss, x)[0])
    module, cache = made(), MemoryCache()
    steps = torch.cat([module(x[:, t : t + 1], memory, cache=cache) for t in range(5)], 1)
    for g, w in zip(
        torch.autograd.grad(steps.square().sum(), [*module.parameters()]),
        torch.autograd.grad(module(x, memory).square().sum(), [*module.parameters()]),
        strict=True,
    ):
        close(g, w)


@every_cache
@either(
    ("first", "then"), [("inference", "no_grad"), ("no_grad", "inference"), ("inference", "grad"), ("no_grad", "grad")]
)
def test_a_cache_survives_a_change_of_gradient_mode(new_cache, first, then):
    modes = {"inference": torch.inference_mode, "no_grad": torch.no_grad, "grad": torch.enable_grad}
    module, x, cache = made(position=Rotary()), tokens(), new_cache()
    window = (WINDOW - 1, 0) if isinstance(cache, SlidingCache) else None
    with modes[first]():
        module(x[:, :6], causal=True, cache=cache)
    with modes[then]():
        out = torch.cat([module(x[:, t : t + 1], causal=True, cache=cache) for t in range(6, TOKENS)], 1)
    close(out.clone(), module(x, causal=True, window=window)[:, 6:])


@every_cache
def test_decoding_without_gradients_leaves_earlier_gradients_intact(new_cache):
    module, x, cache = made(), tokens().requires_grad_(), new_cache()
    want = torch.autograd.grad(module(x[:, :5], causal=True, cache=new_cache()).square().sum(), x)[0]
    out = module(x[:, :5], causal=True, cache=cache)
    with torch.no_grad():
        module(x[:, 5:7], causal=True, cache=cache)
    close(torch.autograd.grad(out.square().sum(), x)[0], want)


@either("options", [{}, {"qk_norm": "layer", "num_kv_heads": 2}, {"position": Rotary()}], ids=str)
@every_cache
def test_cached_decoding_under_autocast(new_cache, options):
    module, x = made(**options, dtype=torch.float32), tokens().float()
    window = (WINDOW - 1, 0) if isinstance(new_cache(), SlidingCache) else None
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        close(decode(module, x, new_cache(), [5, 1, 5]), module(x, causal=True, window=window), 0.1)


@every_cache
@every_position
def test_a_call_of_no_tokens_leaves_a_cache_unchanged(new_cache, position):
    """No tokens are a legal input: an empty result, and the cache goes on as before."""
    module, x, cache = made(position=position), tokens(), new_cache()
    window = (WINDOW - 1, 0) if isinstance(cache, SlidingCache) else None
    close(decode(module, x, cache, [0, 3, 0, 7, 1, 0]), module(x, causal=True, window=window))
    assert module(tokens(2, batch=0), causal=True, cache=new_cache()).shape == (0, 2, WIDTH)


@every_cache
def test_reset_empties_a_cache_and_copies_are_independent(new_cache):
    module, x, cache = made(num_kv_heads=2, position=Rotary()), tokens(), new_cache()
    window = (WINDOW - 1, 0) if isinstance(cache, SlidingCache) else None
    want = module(x, causal=True, window=window)
    with torch.no_grad():
        module(x[:, :4], causal=True, cache=cache)
        fork = copy.deepcopy(cache)
        module(tokens(3), causal=True, cache=cache)
        close(module(x[:, 4:], causal=True, cache=fork), want[:, 4:])  # the other one's tokens are not in it
    cache.reset()
    assert cache.length == 0
    close(decode(module, x[:1], cache, [6, 5]), want[:1])  # another batch size is fine now
    if not isinstance(cache, SlidingCache):
        cache.reset()
        module(x[:, :4], causal=True, cache=cache, lengths=torch.tensor([4, 1, 2]))
        cache.reset()
        close(decode(module, x, cache, [6, 5]), want)  # of the different lengths nothing is left


@pytest.fixture
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@every_cache
def test_compiled_decoding_equals_eager_decoding(new_cache):
    module, x, cache = made(num_kv_heads=2, position=Rotary()), tokens(), new_cache()
    window = (WINDOW - 1, 0) if isinstance(cache, SlidingCache) else None
    compiled = torch.compile(module, backend="aot_eager")
    with torch.no_grad():
        close(decode(compiled, x, cache, [6, 1, 1, 1, 1, 1]), module(x, causal=True, window=window))


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@every_cache
def test_compiled_decoding_takes_one_graph_for_all_steps(new_cache, dtype):
    module = made(num_kv_heads=2, position=Rotary(), dtype=dtype)
    x, cache, plain = tokens(13).to(dtype), new_cache(), new_cache()
    if isinstance(cache, StaticCache):
        cache.max_length = plain.max_length = 13
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=graphs, fullgraph=True)
    with torch.no_grad():
        close(decode(compiled, x[:, :4], cache, [4]), decode(module, x[:, :4], plain, [4]), atol=1e-4)
        assert graphs.frame_count == 1  # of the prompt
        for token in x[:, 4:].split(1, 1):
            close(decode(compiled, token, cache, [1]), decode(module, token, plain, [1]), atol=1e-4)
    # a sliding cache that is full starts its buffer again, which is a second graph
    assert graphs.frame_count == (3 if isinstance(cache, SlidingCache) else 2)


@pytest.mark.usefixtures("_fresh_compiler")
def test_compiled_decoding_of_different_lengths_takes_one_graph():
    module, x = made(num_kv_heads=2, position=Rotary()), tokens(13)
    cache, plain, lengths = StaticCache(17), StaticCache(17), torch.tensor([4, 1, 2])
    graphs = CompileCounterWithBackend("aot_eager")
    compiled, counts = torch.compile(module, backend=graphs, fullgraph=True), []
    with torch.no_grad():
        for each in (cache, plain):
            module(x[:, :4], causal=True, cache=each, lengths=lengths)
        for token in x[:, 4:].split(1, 1):
            close(decode(compiled, token, cache, [1]), decode(module, token, plain, [1]))
            counts.append(graphs.frame_count)
    assert counts[1:] == [2] * 8  # the first step knows no better than that its length is fixed


@torch.no_grad()
def test_copies_of_a_cache_serve_copies_of_its_layer():
    module, x = made(num_kv_heads=2), tokens()
    for cache in (KVCache(), StaticCache(13), SlidingCache(WINDOW)):
        module(x[:, :5], causal=True, cache=cache)
        copies = copy.deepcopy((cache, module)), pickle.loads(pickle.dumps((cache, module)))
        want = module(x[:, 5:6], causal=True, cache=cache)
        for held, layer in copies:
            close(layer(x[:, 5:6], causal=True, cache=held), want)


@torch.no_grad()
def test_one_cache_does_not_serve_two_layers():
    first, second, x = made(num_kv_heads=2), made(num_kv_heads=2), tokens()
    for cache in (KVCache(), StaticCache(13), SlidingCache(WINDOW)):
        first(x, causal=True, cache=cache)
        with pytest.raises(CacheError, match="holds the keys and values of another layer; .* make one per layer"):
            second(x, causal=True, cache=cache)
        fork = copy.deepcopy(cache)  # as a search over several continuations does
        cache.reset()
        second(x, causal=True, cache=cache)
        first(x[:, :1], causal=True, cache=fork)
    memory = MemoryCache()
    first(x, x.clone(), cache=memory)
    with pytest.raises(CacheError, match="another layer"):
        second(x, x.clone(), cache=memory)


X = torch.zeros(BATCH, 2, WIDTH)
REFUSED = [
    ("growing", (X[:1],), {}, CacheError, r"keys of 3 sequences, 6 heads x 4, got 1, 6 x 4; .* or .reset\(\) it"),
    ("static", (X[:1],), {}, CacheError, "one cache serves one layer and one batch"),
    ("sliding", (X[:1],), {}, CacheError, "one cache serves one layer and one batch"),
    ("static", (torch.zeros(BATCH, 9, WIDTH),), {}, CacheError, r"full: it has room for 13 keys, holds 5, needs 14"),
    ("sliding", (X,), {"lengths": torch.tensor([7, 6, 6])}, CacheError, r"one length for all .*; use KVCache\(\)"),
    ("sliding", (X,), {"window": (4, 0)}, CacheError, r"window of \(4, 0\) reaches further back than the 4 keys"),
    ("sliding", (X,), {"window": (None, 0)}, CacheError, "reaches further back than the 4 keys"),
    ("sliding", (X,), {"window": [(1, 0)] * 5 + [(4, 0)]}, CacheError, "reaches further back than the 4 keys"),
    (
        "sliding",
        (X,),
        {"keep_first": 1},
        CacheError,
        r"drops the first keys, which keep_first would need; use a KVCache",
    ),
    ("sliding", (X,), {"window": 3}, MaskError, r"window must be a pair \(left, right\)"),
    ("growing", (X, X.clone()), {}, CacheError, r"one fixed memory: give it a MemoryCache\(\), not a KVCache"),
    ("static", (X, X.clone()), {}, CacheError, "MemoryCache.*not a StaticCache"),
    ("growing", (X,), {"lengths": torch.tensor([5, 8, 6])}, CacheError, r"\[5, 5, 5\] are cached and 2 are new, got"),
    ("growing", (X,), {"lengths": torch.tensor([5, 4, 6])}, CacheError, "lengths are the total keys of each sequence"),
    ("growing", (X,), {"lengths": torch.tensor([7, 7])}, HeadwiseError, "lengths"),
    ("growing", (X,), {"lengths": torch.tensor([7.0, 7, 6])}, MaskError, "lengths must be 3 whole numbers"),
    ("growing", (X,), {"lengths": [7, 7, 6]}, MaskError, "lengths must be a tensor"),
    ("growing", (X, X, X[:, :1]), {}, HeadwiseError, "each key needs a value"),
    ("static", (X, X, X[:, :1]), {}, HeadwiseError, "each key needs a value"),
    ("sliding", (X, X, X[:, :1]), {}, HeadwiseError, "each key needs a value"),
    ("growing", (X, X, X[:1]), {}, HeadwiseError, "each key needs a value"),
    *((name, (X,), {"mask": torch.ones(2, 4).bool()}, MaskError, r"mask \(2, 4\) does not") for name in CACHES),
    *((name, (X,), {"gates": torch.ones(5)}, ShapeError, "gates must be one number per query head") for name in CACHES),
    *((name, (X,), {"positions": torch.arange(3)}, ShapeError, "positions") for name in CACHES),
    *((name, (X[0],), {}, ShapeError, "query must be") for name in CACHES),
    ("growing", (X,), {"window": (-1, 0)}, MaskError, "window's left side"),
    ("growing", (X.double(),), {}, ShapeError, "float64"),
]


@either(("name", "inputs", "call_options", "kind", "words"), REFUSED)
@either("grad", [True, False])
def test_a_failed_call_leaves_the_cache_unchanged(name, inputs, call_options, kind, words, grad):
    module, x = made(position=Rotary(), dtype=torch.float32), tokens().float()
    window = (WINDOW - 1, 0) if name == "sliding" else None
    want = module(x, causal=True, window=window)
    cache = CACHES[name]()
    with torch.set_grad_enabled(grad):
        module(x[:, :5], causal=True, cache=cache)
        with pytest.raises(HeadwiseError, match=words) as caught:
            module(*inputs, causal=True, cache=cache, **call_options)
        assert isinstance(caught.value, kind) and "\n" not in str(caught.value)
        assert cache.length == 5
        assert cache.fill is None
        close(decode(module, x[:, 5:], cache, [1, 3, 2]), want[:, 5:], 1e-5)


@every_cache
@either(
    ("inputs", "call_options"),
    [
        ((X,), {"mask": torch.ones(2, 5).bool()}),
        ((X, X, X[:, :1]), {}),
        ((X, X, X[:1]), {}),
        ((X,), {"gates": torch.ones(5)}),
    ],
    ids=["mask", "fewer values", "fewer sequences", "gates"],
)
def test_a_failed_first_call_leaves_the_cache_empty(new_cache, inputs, call_options):
    module, x, cache = made(dtype=torch.float32), tokens().float(), new_cache()
    window = (WINDOW - 1, 0) if isinstance(cache, SlidingCache) else None
    with pytest.raises(HeadwiseError):
        module(*inputs, causal=True, cache=cache, **call_options)
    assert cache.length == 0
    close(decode(module, x[:2], cache, [6, 5]), module(x[:2], causal=True, window=window), 1e-5)


def test_a_failed_call_caches_no_memory():
    module, x, memory, cache = made(), tokens(), tokens(7), MemoryCache()
    for wrong, call_options in ((memory[:2], {}), (memory, {"mask": torch.ones(5, 5).bool()})):
        with pytest.raises(HeadwiseError):
            module(x, wrong, cache=cache, **call_options)
        assert cache.memory is None
    close(module(x, memory, cache=cache), module(x, memory))
    with pytest.raises(HeadwiseError, match="the cache holds a memory \\(3, 7\\), got one of \\(2, 7\\)"):
        module(x[:2], memory[:2], cache=cache)
    close(module(x, memory, cache=cache), module(x, memory))


def test_a_failed_call_with_lengths_leaves_the_cache_unchanged():
    module, x, cache = made(position=Rotary()), tokens(), KVCache()
    lengths = torch.tensor([3, 1, 2])
    module(x[:, :3], causal=True, cache=cache, lengths=lengths)
    for call_options in (
        {"lengths": torch.tensor([3, 1, 9])},
        {"mask": torch.ones(5, 5).bool()},
        {"gates": torch.ones(5)},
    ):
        with pytest.raises(HeadwiseError):
            module(x[:, 3:5], causal=True, cache=cache, **call_options)
        assert cache.fill.tolist() == [3, 1, 2] and cache.length == 3
    out = module(x[:, 3:5], causal=True, cache=cache)
    for b, n in enumerate(lengths.tolist()):
        alone = torch.cat([x[b : b + 1, :n], x[b : b + 1, 3:5]], 1)
        close(out[b : b + 1], module(alone, causal=True)[:, n:])


def test_a_cache_of_other_sizes_is_refused():
    """Heads of another number, width or dtype: said before anything is written."""
    x, cache = tokens(2), KVCache()
    made()(x, cache=cache)
    for other, words in (
        (made(num_kv_heads=2), "6 heads x 4, got 3, 2 x 4"),
        (made(head_dim=5), "6 heads x 4, got 3, 6 x 5"),
        (made(dtype=torch.float32), "the cache holds torch.float64 on cpu, got torch.float32 on cpu"),
    ):
        with pytest.raises(CacheError, match=words):
            other(x.to(other.W_Q.weight.dtype), cache=cache)
        assert cache.length == 2


@either("cache", ["static", 5, (torch.zeros(1), torch.zeros(1))], ids=["a word", "a number", "a pair"])
def test_an_object_that_is_no_cache_is_refused(cache):
    with pytest.raises(HeadwiseError, match="cache"):
        made()(tokens(), cache=cache)


def test_self_attention_refuses_a_memory_cache():
    """A MemoryCache would answer every later call with the keys of the first."""
    with pytest.raises(CacheError, match="MemoryCache"):
        made()(tokens(), causal=True, cache=MemoryCache())


@either(
    ("make", "words"),
    [
        (lambda: StaticCache(0), "max_length must be a whole number of at least 1, got 0"),
        (lambda: StaticCache(2.5), "max_length must be a whole number of at least 1, got 2.5"),
        (lambda: StaticCache(True), "max_length must be a whole number of at least 1, got True"),
        (lambda: SlidingCache(-3), "window must be a whole number of at least 1, got -3"),
        (lambda: SlidingCache("4"), "window must be a whole number of at least 1, got '4'"),
    ],
)
def test_invalid_cache_sizes_are_refused(make, words):
    with pytest.raises(ShapeError, match=words):
        make()


# --- reorder and crop ---


def filled(module: MultiHeadAttention, cache: KVCache, x: torch.Tensor, **options) -> KVCache:
    module(x, causal=True, cache=cache, **options)
    return cache


@every_position
@every_cache
@either("order", [[2, 0, 1], [1, 1], [0, 2, 2, 1]], ids=str)
def test_a_reordered_cache_continues_the_sequences_it_was_told(order, new_cache, position):
    module, x, new = made(position=position), tokens(), tokens(2, len(order))
    cache = filled(module, new_cache(), x[:, :9])
    cache.reorder(torch.tensor(order))
    expected = filled(module, new_cache(), x[order, :9])
    close(module(new, causal=True, cache=cache), module(new, causal=True, cache=expected))


def test_a_reordered_cache_keeps_each_sequence_s_length():
    module, x, new = made(), tokens(), tokens(1)
    lengths, order = torch.tensor([9, 3, 5]), torch.tensor([1, 1, 0])
    cache = filled(module, KVCache(), x[:, :9], lengths=lengths)
    cache.reorder(order)
    assert cache.fill.tolist() == [3, 3, 9]
    expected = filled(module, KVCache(), x[order, :9], lengths=lengths[order])
    close(module(new, causal=True, cache=cache), module(new, causal=True, cache=expected))


@every_position
@every_cache
@either("length", [0, 1, 8, 9], ids=str)
def test_a_cropped_cache_is_as_before_the_forgotten_tokens(length, new_cache, position):
    module, x, new = made(position=position), tokens(), tokens(2)
    cache = filled(module, new_cache(), x[:, :9])
    if isinstance(cache, SlidingCache) and 0 < length < 9:  # a long prompt leaves the last window - 1 keys
        with pytest.raises(CacheError, match=r"cannot be cropped from 9 tokens to \d: it has forgotten"):
            cache.crop(length)
        assert cache.length == 9
        return
    cache.crop(length)
    assert cache.length == length
    expected = filled(module, new_cache(), x[:, :length]) if length else new_cache()
    close(module(new, causal=True, cache=cache), module(new, causal=True, cache=expected))


def test_a_sliding_cache_crops_as_far_as_its_buffer_reaches():
    module, x, new = made(), tokens(), tokens(1)
    cache = SlidingCache(WINDOW)
    decode(module, x[:, :6], cache, [3, 1, 1, 1])
    cache.crop(4)
    expected = SlidingCache(WINDOW)
    decode(module, x[:, :4], expected, [3, 1])
    close(module(new, causal=True, cache=cache), module(new, causal=True, cache=expected))


def test_a_cropped_cache_shortens_only_the_longer_sequences():
    module, x, new = made(), tokens(), tokens(1)
    cache = filled(module, KVCache(), x[:, :9], lengths=torch.tensor([9, 3, 5]))
    cache.crop(4)
    assert (cache.length, cache.fill.tolist()) == (4, [4, 3, 4])
    expected = filled(module, KVCache(), x[:, :4], lengths=torch.tensor([4, 3, 4]))
    close(module(new, causal=True, cache=cache), module(new, causal=True, cache=expected))


def test_a_memory_cache_is_reordered_and_forgets_queries_only():
    module, memory, x = made(), tokens(5), tokens(4)
    cache = MemoryCache()
    module(x, memory, cache=cache)
    cache.reorder(torch.tensor([2, 0, 1]))
    cache.crop(1)
    assert cache.queries == 1
    close(module(x, memory[[2, 0, 1]], cache=cache), module(x, memory[[2, 0, 1]]))


@either(
    ("call", "message"),
    [
        (lambda cache: cache.reorder([0, 1]), r"indices must be a tensor \(B,\) of whole numbers, got \[0, 1\]"),
        (lambda cache: cache.reorder(torch.ones(2)), r"of whole numbers, got torch.float32 \(2,\)"),
        (lambda cache: cache.reorder(torch.tensor([0, 3])), r"sequences 0 to 2, got indices \[0, 3\]"),
        (lambda cache: cache.crop(10), "holds 9 tokens and cannot be cropped to 10"),
        (lambda cache: cache.crop(-1), "length must be a whole number of at least 0, got -1"),
    ],
)
def test_impossible_reorders_and_crops_are_refused(call, message):
    cache = filled(made(), KVCache(), tokens()[:, :9])
    with pytest.raises(HeadwiseError, match=message):
        call(cache)
    assert cache.length == 9
