"""Roles of other people: registered by a decorator or an entry point, measured, saved, merged and refused."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headwise
from headwise.role_definitions import registry
from headwise.roles import RoleDefinition, add_role, all_roles, role, role_score
from helpers.role_heads import HEADS, circuit, encoder, texts, tokenizer

pytestmark = pytest.mark.usefixtures("own_role_registry")


def last_token(pairs: Any) -> Any:
    real = pairs.key.real
    return (real & (real.cumsum(1) == real.sum(1, keepdim=True)))[:, None]


def register_last(**options: Any) -> None:
    options = {"threshold": 0.2, "meaning": "weight on the last token", "source": "this test"} | options
    role("last", **options)(last_token)


def measure_atlas(count: int = 31) -> headwise.Atlas:
    corpus = texts(count)
    counts = np.ones(len(tokenizer()))
    return headwise.atlas(encoder(counts), corpus, tokenizer())


def test_a_registered_role_is_measured_and_printed() -> None:
    register_last()
    atlas = measure_atlas()
    assert [head.name for head in atlas.heads_with("last")] == [f"0.{HEADS.index('delimiter')}"]  # [SEP] is last
    assert "last" in str(atlas) and all_roles()[-1].meaning == "weight on the last token"
    lengths = np.array([len(ids) for ids in tokenizer()(texts(31))["input_ids"]])
    equal = len(lengths) / lengths.sum()  # each query has 1 / length there
    assert atlas.baseline["last"]["self"][0] == pytest.approx(equal, abs=1e-5)


def test_a_registered_role_leaves_the_other_scores_as_they_are() -> None:
    plain = measure_atlas()
    register_last()
    atlas = measure_atlas()
    assert set(atlas.scores) - set(plain.scores) == {"last", "last:argmax"}
    for name, kinds in plain.scores.items():
        np.testing.assert_array_equal(atlas.scores[name]["self"], kinds["self"], err_msg=name)


def test_a_role_by_argmax_counts_the_largest_weight() -> None:
    register_last(argmax=True)
    atlas = measure_atlas()
    definition = all_roles()[-1]
    assert definition.score == "last:argmax"
    assert definition.meaning == "how often its largest weight is on the last token"
    assert atlas.rank_heads("last")[0].score == pytest.approx(np.nanmax(atlas.scores["last:argmax"]["self"]))


def test_a_role_on_repeated_tokens_counts_the_key_that_it_names() -> None:
    role(
        "two_after", threshold=0.3, meaning="weight two tokens after the first occurrence", source="this test",
        measured_on="repetition", ways=("causal",),
    )(lambda earlier: earlier + 2)  # fmt: skip
    atlas = headwise.atlas(circuit(), texts(7), tokenizer(around=False))
    induction, later = (atlas.scores[name]["self"] for name in ("induction", "two_after"))
    assert induction[1, 0] > 0.9 and later[1, 0] < 0.1


def test_an_atlas_with_a_role_of_others_opens_where_the_role_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_last()
    measure_atlas().save(tmp_path / "atlas.json", sums=True)
    for table in (registry._roles, registry._scores):
        table.pop("last")  # type: ignore[attr-defined]
    opened = headwise.Atlas.load(tmp_path / "atlas.json")
    assert "last" in opened.scores and "last" not in {role.role for role in opened.roles}
    assert "last" not in str(opened)


def test_atlases_with_and_without_a_role_do_not_merge() -> None:
    plain = measure_atlas()
    register_last()
    with pytest.raises(headwise.HeadwiseError, match="different models or of other settings"):
        plain.merge(measure_atlas(29))


def test_a_run_with_other_roles_is_not_resumed(tmp_path: Path) -> None:
    checkpoint = tmp_path / "unfinished.safetensors"
    model, words = encoder(np.ones(len(tokenizer()))), tokenizer()
    headwise.atlas(model, texts(5), words, resume=checkpoint, keep_checkpoint=True)
    register_last()
    with pytest.raises(headwise.HeadwiseError, match="an unfinished run with other roles"):
        headwise.atlas(model, texts(5), words, resume=checkpoint)


def test_a_role_decided_by_a_score_of_ours_needs_no_function() -> None:
    add_role(RoleDefinition("mostly_special", "special", 0.7, ("both ways",), "this test"))
    assert {head.head for head in measure_atlas().heads_with("mostly_special")} <= {HEADS.index("delimiter")}


def test_a_module_may_register_its_own_role_again() -> None:
    register_last()
    register_last(threshold=0.9)
    assert all_roles()[-1].threshold == 0.9


@pytest.mark.parametrize(
    ("register", "message"),
    [
        (lambda: register_last(threshold=0), "threshold of role 'last' must be above 0, got 0"),
        (lambda: register_last(ways=("sideways",)), r"ways of attention are 'both ways', 'causal', 'cross', got \("),
        (lambda: register_last(measured_on="rows"), "measured on 'pairs' or 'repetition', got 'rows'"),
        (lambda: role_score("a:b", "weight on a")(last_token), "a score's name is a word without ':' and '/'"),
        (lambda: role_score("first", "weight on it")(last_token), "a score 'first' already, from headwise.role_def"),
        (
            lambda: add_role(RoleDefinition("first", "first", 0.1, ("causal",), "us")),
            "there is a role 'first' already, from headwise.role_definitions.tokens; choose another name",
        ),
        (
            lambda: add_role(RoleDefinition("new", "nothing", 0.1, ("causal",), "us")),
            "role 'new' is decided by 'nothing', which is no score; register that first",
        ),
    ],
)
def test_what_cannot_be_a_role_is_refused_and_leaves_nothing_behind(register: Any, message: str) -> None:
    before = dict(registry._roles), dict(registry._scores)
    with pytest.raises(headwise.HeadwiseError, match=message):
        register()
    assert (registry._roles, registry._scores) == before


@pytest.mark.parametrize(
    ("function", "got"), [(lambda pairs: pairs.key.real, r"\(\d+, \d+\)"), (lambda pairs: 3, "int")]
)
def test_a_function_of_the_wrong_shape_is_named(function: Any, got: str) -> None:
    role("last", threshold=0.4, meaning="weight on it", source="this test")(function)
    with pytest.raises(headwise.HeadwiseError, match=rf"function of 'last' must give a tensor that .* got {got}"):
        measure_atlas(7)


def test_a_key_outside_the_text_is_named() -> None:
    role("far", threshold=0.4, meaning="weight on it", source="this test", measured_on="repetition", ways=("causal",))(
        lambda earlier: earlier + 1000
    )
    with pytest.raises(headwise.HeadwiseError, match="function of 'far' must give one position from 0 to"):
        headwise.atlas(circuit(), texts(3), tokenizer(around=False))


def plugins(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setattr(registry, "_plugins_loaded", False)
    points = (EntryPoint("theirs", value, "headwise.roles"),)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points if group == "headwise.roles" else ())


def test_roles_of_an_installed_package_are_found_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_roles.py").write_text(
        "from headwise.roles import role\n"
        "@role('theirs', threshold=0.5, meaning='weight on anything', source='they')\n"
        "def theirs(pairs):\n"
        "    return pairs.visible\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    plugins(monkeypatch, "their_roles")
    assert all_roles()[-1].name == "theirs"
    sys.modules.pop("their_roles")


def test_a_package_whose_roles_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plugins(monkeypatch, "no_such_module")
    with pytest.raises(headwise.HeadwiseError, match="the roles 'theirs' of another package cannot be loaded: Module"):
        all_roles()


def test_the_example_of_the_package_is_a_role() -> None:
    import headwise.role_definitions as package

    assert package.__doc__ is not None
    lines = package.__doc__.split("    from headwise.roles import role\n")[1].splitlines()
    source = "from headwise.roles import role\n" + "\n".join(line[4:] for line in lines)
    exec(source, {"__name__": "example"})
    assert all_roles()[-1].name == "last"
    assert measure_atlas(7).scores["last"]["self"].shape == (1, len(HEADS))


def test_every_file_of_the_folder_is_imported() -> None:
    import headwise.role_definitions as package

    files = {path.stem for path in Path(package.__path__[0]).glob("*.py")} - {"__init__"}
    assert files == {name.rpartition(".")[2] for name in sys.modules if name.startswith(package.__name__ + ".")}


def test_roles_are_registered_without_torch() -> None:
    code = (
        "import sys, headwise.role_definitions as r; r.all_roles(); print('torch' in sys.modules, len(r.all_roles()))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["False", "26"]
