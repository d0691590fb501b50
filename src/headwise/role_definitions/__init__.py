"""The roles that a head can have: what is measured, and from which value on a head has the role.

A role is one decorated function in one file of this folder; every file here is found automatically. Other packages
add roles with the same decorator, or name a module of theirs under the entry point group "headwise.roles":

    from headwise.roles import role

    @role("last", threshold=0.5, meaning="weight on the last token", source="our own texts", ways=("both ways",))
    def last(pairs):
        real = pairs.key.real                                                              # (B, Tk)
        return (real & (real.cumsum(1) == real.sum(1, keepdim=True)))[:, None]             # (B, 1, Tk)
"""

from __future__ import annotations

import importlib
import pkgutil

from .pairs import Pairs as Pairs
from .pairs import Tokens as Tokens
from .registry import ANY as ANY
from .registry import ARGMAX as ARGMAX
from .registry import BOTH as BOTH
from .registry import CAUSAL as CAUSAL
from .registry import CROSS as CROSS
from .registry import SELF as SELF
from .registry import RoleDefinition as RoleDefinition
from .registry import RoleScore as RoleScore
from .registry import add_role as add_role
from .registry import added_scores as added_scores
from .registry import all_roles as all_roles
from .registry import columns as columns
from .registry import definition as definition
from .registry import meaning as meaning
from .registry import meanings as meanings
from .registry import pair_scores as pair_scores
from .registry import repetition_scores as repetition_scores
from .registry import role as role
from .registry import role_score as role_score
from .registry import sink_roles as sink_roles

# In the order of the tables that are printed; files that are not named here follow, by name.
_ORDER = ("positions", "tokens", "repetition", "spread", "probes")
_HELPERS = ("pairs", "registry")

_files = sorted(module.name for module in pkgutil.iter_modules(__path__))
for _name in (*_ORDER, *(name for name in _files if name not in (*_ORDER, *_HELPERS))):
    importlib.import_module(f".{_name}", __name__)
