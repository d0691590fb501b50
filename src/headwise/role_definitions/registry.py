"""Scores and roles by name: the decorators that register them, and the questions that the atlas asks of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import HeadwiseError

if TYPE_CHECKING:
    from torch import Tensor


ENTRY_POINTS = "headwise.roles"
LIFT = 2.0  # times the score of uniform attention, at least; or very short texts would make roles
BOTH, CAUSAL, CROSS = (
    "both ways",
    "causal",
    "cross",
)  # ways of attention: to all tokens, to earlier ones, to another text
SELF = (BOTH, CAUSAL)
ANY = (BOTH, CAUSAL, CROSS)
ARGMAX = ":argmax"  # how often the largest weight is there, beside how much weight is
PAIRS, REPETITION, ROW, PROBE = "pairs", "repetition", "row", "probe"  # what a score is measured on, see RoleScore

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class RoleScore:
    """One number per head that a corpus, or repeated random tokens, give: a mean over queries."""

    name: str
    meaning: str
    # PAIRS of a query and a key in texts; REPETITION: random tokens repeated once; ROW: a whole row; PROBE: inputs of
    # its own, measured on request (`roles/atlas/probes`)
    measured_on: str
    function: Callable[..., Tensor] | None  # of PAIRS: Pairs -> (B, Tq, Tk); of REPETITION: positions -> positions
    positional: bool = False  # compares positions of query and key, which cross-attention does not have in common
    where_present: bool = False  # the mean is over the queries that have such a key; else over all queries


@dataclass(frozen=True, slots=True)
class RoleDefinition:
    """A role. A head has it if its score is high enough and its whole interval lies above the baseline."""

    name: str
    score: str  # the score that decides
    threshold: float
    ways: tuple[str, ...]  # of attention for which it makes sense
    source: str  # where the threshold comes from
    relative: bool = False  # the threshold is a share of the baseline, which cannot be beaten but only reached
    unless: tuple[str, ...] = ()  # more specific roles; a head with one of them does not have this role
    sink: bool = False  # an attention sink: heads attend there when no other token is relevant
    lift: float = LIFT  # times the baseline, at least
    reach_only: bool = False  # says how far a head looks and not for what: such a head still counts as one without role

    @property
    def meaning(self) -> str:
        return meaning(self.score)

    def level(self, baseline: float) -> float:
        """The score that is needed beside a baseline."""
        return self.threshold * baseline if self.relative else max(self.threshold, self.lift * baseline)

    def is_met(self, score: float, baseline: float, low: float) -> bool:
        """Whether a head with this score and lower end of its interval has the role."""
        if not score >= self.level(baseline):  # also false for NaN
            return False
        return low >= self.level(baseline) if self.relative else low > baseline


_scores: dict[str, RoleScore] = {}
_roles: dict[str, RoleDefinition] = {}
_owners: dict[tuple[str, str], str] = {}  # ("score" or "role", its name) -> the module that registered it
_plugins_loaded = False


def role(
    name: str,
    *,
    threshold: float,
    meaning: str,
    source: str,
    ways: tuple[str, ...] = ANY,
    measured_on: str = PAIRS,
    argmax: bool = False,
    positional: bool = False,
    where_present: bool = False,
    unless: tuple[str, ...] = (),
    sink: bool = False,
) -> Callable[[F], F]:
    """Register a function as a role: the score of that name, and from which value on a head has the role.

    Args:
        name: of the role and of its score.
        threshold: the score that a head needs, from 0 to 1; at least twice that of uniform attention is needed too.
        meaning: what is measured, such as "weight on the last token".
        source: where the threshold comes from, such as a paper.
        ways: of attention for which the role makes sense: "both ways", "causal", "cross".
        measured_on: "pairs": the function takes Pairs and gives (B, Tq, Tk), or what broadcasts to it: 1 where weight
            counts for the role. "repetition": for random tokens repeated once, it takes the positions of the tokens'
            first occurrence and gives the positions that weight counts on.
        argmax: the share of queries whose largest weight counts decides, instead of the share of the weight.
        positional: it compares positions of query and key, so it is not measured in cross-attention.
        where_present: the mean is over the queries that have a key to find, instead of over all.
        unless: names of roles that say the same more exactly; a head that has one of them does not have this.
        sink: an attention sink, where heads attend when no other token is relevant.

    Returns:
        a decorator that gives the function back unchanged.

    Example:
        >>> @role("digits", threshold=0.5, meaning="weight on digits", source="our own texts")
        ... def digits(pairs):
        ...     return is_digit[pairs.key.ids][:, None]     # is_digit: (vocabulary,) bool
    """

    score = name + ARGMAX if argmax else name
    definition = RoleDefinition(name, score, threshold, ways, source, unless=unless, sink=sink)
    _check(definition)
    score_decorator = role_score(
        name, meaning, measured_on=measured_on, positional=positional, where_present=where_present
    )

    def register(function: F) -> F:
        _check_free("role", name, _roles, function.__module__)  # before its score is registered
        score_decorator(function)
        add_role(definition, function.__module__)
        return function

    return register


def role_score(
    name: str, meaning: str, *, measured_on: str = PAIRS, positional: bool = False, where_present: bool = False
) -> Callable[[F], F]:
    """Register a function as a score of the atlas without a role of its own; arguments are those of `role`."""
    if not name or ARGMAX[0] in name or "/" in name:
        raise HeadwiseError(f"a score's name is a word without ':' and '/', got {name!r}")
    if measured_on not in (PAIRS, REPETITION):
        raise HeadwiseError(f"a score is measured on {PAIRS!r} or {REPETITION!r}, got {measured_on!r}")

    def register(function: F) -> F:
        _check_free("score", name, _scores, function.__module__)
        _scores[name] = RoleScore(name, meaning, measured_on, function, positional, where_present)
        _owners["score", name] = function.__module__
        return function

    return register


def add_row_score(name: str, meaning: str) -> None:
    """Name a statistic of whole rows; the observer computes these itself."""
    _scores[name], _owners["score", name] = RoleScore(name, meaning, ROW, None), __name__


def add_probe_score(name: str, meaning: str) -> None:
    """Name a score that a probe of the atlas measures on inputs of its own."""
    _scores[name], _owners["score", name] = RoleScore(name, meaning, PROBE, None), __name__


def add_role(definition: RoleDefinition, module: str = "__main__") -> None:
    """Register a role that is decided by a score which is registered already. module: who registers it."""
    _check(definition)
    base = definition.score.removesuffix(ARGMAX)
    if base not in _scores:
        raise HeadwiseError(f"role {definition.name!r} is decided by {base!r}, which is no score; register that first")
    _check_free("role", definition.name, _roles, module)
    _roles[definition.name], _owners["role", definition.name] = definition, module


def _check(definition: RoleDefinition) -> None:
    if not definition.threshold > 0:
        raise HeadwiseError(f"the threshold of role {definition.name!r} must be above 0, got {definition.threshold}")
    if not definition.ways or not set(definition.ways) <= set(ANY):
        raise HeadwiseError(f"ways of attention are {', '.join(map(repr, ANY))}, got {definition.ways!r}")


def _check_free(category: str, name: str, registered: Iterable[str], module: str) -> None:
    """A module may replace what it registered itself, as a notebook does whose cell runs twice."""
    if name in registered and _owners[category, name] != module:
        owner = _owners[category, name]
        raise HeadwiseError(f"there is a {category} {name!r} already, from {owner}; choose another name")


def _load_plugins() -> None:
    """Import what installed packages name under the entry point group, once."""
    global _plugins_loaded
    if _plugins_loaded:
        return
    from importlib.metadata import entry_points  # slow to import, and not needed for the roles of headwise itself

    _plugins_loaded = True  # first, for a plug-in may ask for the roles that there are
    for plugin in entry_points(group=ENTRY_POINTS):
        try:
            plugin.load()
        except Exception as error:
            _plugins_loaded = False
            raise HeadwiseError(
                f"the roles {plugin.name!r} of another package cannot be loaded: {type(error).__name__}: {error}; "
                f"repair or uninstall the package that has {plugin.value!r}"
            ) from error


def all_roles() -> tuple[RoleDefinition, ...]:
    """Every role, ours first, then those of other packages."""
    _load_plugins()
    return tuple(_roles.values())


def definition(name: str) -> RoleDefinition:
    """The role of that name; an error says which there are."""
    if name not in _roles:
        _load_plugins()
    if name not in _roles:
        raise HeadwiseError(f"there is no role {name!r}; there are {', '.join(_roles)}")
    return _roles[name]


def sink_roles() -> tuple[str, ...]:
    """Names of the roles whose heads attend to attention sinks (Clark et al. 2019, Gu et al. 2024)."""
    return tuple(role.name for role in all_roles() if role.sink)


def meaning(score: str) -> str:
    """What a score measures, in words; "" for one that is not registered here."""
    base, _, argmax = score.partition(":")
    if base not in _scores:
        _load_plugins()
    words = _scores[base].meaning if base in _scores else ""
    return words.replace("weight on", "how often its largest weight is on") if argmax else words


def meanings() -> dict[str, str]:
    """What every score measures, by name."""
    _load_plugins()
    return {score.name: score.meaning for score in _scores.values()}


def pair_scores(way: str) -> tuple[RoleScore, ...]:
    """The scores that are shares of the weight on texts, for one way of attention."""
    _load_plugins()
    return tuple(
        score for score in _scores.values() if score.measured_on == PAIRS and not (way == CROSS and score.positional)
    )


def repetition_scores() -> tuple[RoleScore, ...]:
    """The scores that are measured on random tokens repeated once."""
    _load_plugins()
    return tuple(score for score in _scores.values() if score.measured_on == REPETITION)


def added_scores() -> list[str]:
    """Names of the scores that are not headwise's own, which an atlas measured elsewhere may not have."""
    _load_plugins()
    return [name for name in _scores if not _owners["score", name].startswith(__package__)]


def columns(way: str) -> tuple[str, ...]:
    """Names of all that is measured on texts: shares of the weight, the same of the argmax, and those of whole rows."""
    shares = [score.name for score in pair_scores(way)]
    rows = [score.name for score in _scores.values() if score.measured_on == ROW]
    return (*shares, *(name + ARGMAX for name in shares), *rows)
