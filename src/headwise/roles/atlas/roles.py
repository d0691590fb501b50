"""The roles a head can have, one row each: what is measured, what it must beat, and from when on the head has it."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import HeadwiseError

REACH = 5  # offsets that are told apart
NEAR = 3  # tokens to either side that are local
LIFT = 2.0  # never less than twice what equal attention has, or a corpus of very short texts would make roles
BOTH, CAUSAL, CROSS = (
    "both ways",
    "causal",
    "cross",
)  # ways of attention: to all tokens, to those before, to another text
SELF = (BOTH, CAUSAL)
ANY = (BOTH, CAUSAL, CROSS)
ARGMAX = ":argmax"  # how often the largest weight is there, beside how much weight is


def offset_name(step: int) -> str:
    return {-1: "previous", 0: "self", 1: "next"}.get(step, f"offset{step:+d}")


OFFSETS = {offset_name(step): step for step in range(-REACH, REACH + 1)}

# Shares of the weight, each with its argmax twin; then what a whole row of weights has.
POSITIONAL = (*OFFSETS, "local", "distance")
CLASSES = ("first", "special", "punctuation", "delimiter", "rare", "same_word")
ROWS = ("entropy", "confidence", "broad")
PROBES = ("induction", "duplicate")

MEANING = {
    **{name: f"weight on the token {abs(step)} {'before' if step < 0 else 'after'}" for name, step in OFFSETS.items()},
    "previous": "weight on the token before",
    "next": "weight on the token after",
    "self": "weight on the token itself",
    "local": f"weight on the {NEAR} tokens on either side",
    "distance": "how far it looks, in tokens",
    "first": "weight on the first token",
    "special": "weight on tokens that the tokenizer adds",
    "punctuation": "weight on punctuation",
    "delimiter": "weight on added tokens and punctuation",
    "rare": "weight on the rarest other token it can see, by the corpus's own counts",
    "same_word": "weight on other places of the same word, where there are any",
    "entropy": "how widely it spreads, in nats",
    "confidence": "its largest weight",
    "broad": "its entropy as a share of equal attention's",
    "induction": "weight on the token after the same token's place before, in random tokens repeated once",
    "duplicate": "weight on the same token's place before, in random tokens repeated once",
}


@dataclass(frozen=True, slots=True)
class Definition:
    """A role. A head has it if its score is high enough and its whole interval lies above the baseline."""

    name: str
    score: str  # the measured number that decides
    threshold: float
    ways: tuple[str, ...]  # of attention for which it makes sense
    source: str  # where the threshold comes from
    relative: bool = False  # the threshold is a share of the baseline, which cannot be beaten but only reached
    unless: tuple[str, ...] = ()  # roles that say the same more exactly

    @property
    def words(self) -> str:
        base, _, argmax = self.score.partition(":")
        return MEANING[base] if not argmax else MEANING[base].replace("weight on", "how often its largest weight is on")

    def level(self, baseline: float) -> float:
        """The score that is needed beside a baseline."""
        return self.threshold * baseline if self.relative else max(self.threshold, LIFT * baseline)

    def held(self, score: float, baseline: float, low: float) -> bool:
        """Whether a head with this score and lower end of its interval has the role."""
        if not score >= self.level(baseline):  # also false for NaN
            return False
        return low >= self.level(baseline) if self.relative else low > baseline


HALF = "half of the weight, as for positions in Clark et al. 2019"
CLARK, GU = "Clark et al. 2019", "Gu et al. 2024"
STEPS = tuple(
    Definition(name, name, 0.5, (BOTH,) if step > 0 else SELF, CLARK) for name, step in OFFSETS.items() if step != 0
)
ROLES = (
    *sorted(STEPS, key=lambda one: (abs(OFFSETS[one.name]), OFFSETS[one.name])),
    Definition("self", "self", 0.5, SELF, CLARK),
    Definition("local", "local", 0.5, SELF, HALF, unless=tuple(name for name in OFFSETS if name != "self")),
    # in encoders the first token is one that the tokenizer adds: a delimiter
    Definition("first", "first", 0.3, (CAUSAL,), GU),
    Definition("delimiter", "delimiter", 0.6, ANY, CLARK),
    Definition("punctuation", "punctuation", 0.5, ANY, HALF),
    Definition("rare", "rare" + ARGMAX, 0.5, ANY, "most tokens; two thirds in Voita et al. 2019"),
    Definition("same_word", "same_word", 0.5, ANY, HALF),
    Definition("duplicate", "duplicate", 0.5, SELF, HALF),
    Definition("induction", "induction", 0.5, (CAUSAL,), HALF),
    Definition("broad", "broad", 0.9, ANY, "nearly as wide as can be", relative=True),
)
RESTING = (
    "first",
    "delimiter",
    "punctuation",
)  # where heads look that look for nothing: Clark et al. 2019, Gu et al. 2024
BY_NAME = {role.name: role for role in ROLES}


def definition(name: str) -> Definition:
    """The role of that name; an error says which there are."""
    if name not in BY_NAME:
        raise HeadwiseError(f"there is no role {name!r}; there are {', '.join(BY_NAME)}")
    return BY_NAME[name]


def marks(way: str) -> tuple[str, ...]:
    """The shares that are measured on texts, for one way of attention."""
    return CLASSES if way == CROSS else (*POSITIONAL, *CLASSES)


def columns(way: str) -> tuple[str, ...]:
    """Every number that is measured on texts: shares of the weight, the same of the argmax, and those of whole rows."""
    shares = marks(way)
    return (*shares, *(name + ARGMAX for name in shares), *ROWS)
