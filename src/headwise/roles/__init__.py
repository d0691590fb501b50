"""What each head does: statistics over a corpus, roles against a baseline, relations against gold annotation.

`headwise.atlas`, `headwise.relations` and their result classes are in the root package. The names here are for defining
your own roles; `headwise.role_definitions` shows how they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from ..role_definitions import Pairs as Pairs
    from ..role_definitions import RoleDefinition as RoleDefinition
    from ..role_definitions import add_role as add_role
    from ..role_definitions import all_roles as all_roles
    from ..role_definitions import role as role
    from ..role_definitions import role_score as role_score

_MODULES = {
    "Pairs": ".role_definitions",
    "RoleDefinition": ".role_definitions",
    "add_role": ".role_definitions",
    "all_roles": ".role_definitions",
    "role": ".role_definitions",
    "role_score": ".role_definitions",
}

__all__ = [*_MODULES]
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
