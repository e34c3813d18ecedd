"""From TOML and options to one profile: what is accepted, what is refused and in which words."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gptfast.config import load, names, shipped_config
from gptfast.errors import Refused
from gptfast.profile import PRESETS, Profile, TrainConfig, nearest


@pytest.fixture
def profiles(inputs: Path) -> Path:
    return inputs / "profiles"


def refusal(**kwargs: Any) -> str:
    with pytest.raises(Refused) as refused:
        load(**kwargs)
    said = str(refused.value)
    assert "\n" not in said
    return said


# files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said"),
    [
        # CLI-01
        ("unknown_key", ["unknown key train.lerning_rate", "did you mean learning_rate?"]),
        ("unknown_table", ["unknown key trian", "did you mean train?"]),
        ("wrong_type_string", ["train.batch_size = '4'", "integer"]),  # CLI-03
        ("negative", ["train.batch_size = -4", "greater than or equal to 1"]),
        ("head_not_divisor", ["n_head = 3 does not divide n_embd = 32", "use 1, 2, 4"]),
        ("duplicate_key", ["not valid TOML", "line 12"]),
        ("bool_for_int", ["train.batch_size = true", "integer"]),  # CLI-04
        ("float_for_int", ["train.steps = 20.5", "integer"]),
        ("nan_lr", ["train.learning_rate = nan"]),
        ("latin1_comment", ["byte 3 is not UTF-8", "save it as UTF-8"]),
    ],
)
def test_a_wrong_file_is_refused_with_file_key_and_rule(
    profiles: Path, name: str, said: list[str]
) -> None:
    path = profiles / f"{name}.toml"
    line = refusal(config=path)
    assert str(path) in line
    for words in said:
        assert words in line


@pytest.mark.parametrize("name", ["tiny", "bom", "crlf"])
def test_an_odd_but_good_file_is_read(profiles: Path, name: str) -> None:
    """CLI-04."""
    train = load(config=profiles / f"{name}.toml").profile.train
    assert (train.steps, train.batch_size, train.learning_rate, train.seed) == (20, 4, 1e-3, 7)


def test_an_empty_file_is_the_defaults(profiles: Path) -> None:
    """CLI-03."""
    profile = load(config=profiles / "empty.toml", folder=profiles).profile
    path = profile.data.path
    assert profile.replace({"data.path": path}).model_dump() == {
        **Profile().model_dump(),
        "data": {"path": path},
    }


def test_a_relative_path_is_relative_to_the_file_that_says_it(
    profiles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CLI-05."""
    file = profiles / "sub" / "relative_data.toml"
    expected = str((profiles.parent / "text" / "plain_small.txt").resolve())
    for folder in (profiles, profiles / "sub", tmp_path):
        monkeypatch.chdir(folder)
        assert load(config=file).profile.data.path == expected
    overridden = load(config=file, overrides=["data.path=here.h5"], folder=tmp_path)
    assert overridden.profile.data.path == str(tmp_path.resolve() / "here.h5")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("train.batch_size", "0", "greater than or equal to 1"),
        ("model.block_size", "0", "greater than or equal to 1"),
        ("model.dropout", "1.5", "less than 1"),
        ("model.dropout", "-0.1", "greater than or equal to 0"),
        ("train.micro_batch", "5", "micro_batch = 5 does not divide batch_size = 12: use 3, 4, 6"),
        ("model.n_kv_head", "5", "n_kv_head = 5 does not divide n_head"),
        ("train.min_lr", "1.0", "min_lr = 1.0 is above learning_rate"),
        ("train.learning_rate", "inf", "train.learning_rate = inf"),
        ("train.lerning_rate", "1", "did you mean learning_rate?"),
        ("modle.n_layer", "1", "did you mean model?"),
    ],
)
def test_an_impossible_value_is_refused_with_its_rule(
    key: str, value: str, said: str, tmp_path: Path
) -> None:
    """CLI-01, CLI-03, TRN-11."""
    line = refusal(name="baseline", overrides=[f"{key}={value}"], folder=tmp_path)
    assert f"--set {key}={value}" in line
    assert said in line


def test_all_faults_are_said_at_once(tmp_path: Path) -> None:
    line = refusal(
        name="baseline", overrides=["train.steps=0", "model.n_layer=-1"], folder=tmp_path
    )
    assert "train.steps = 0" in line
    assert "model.n_layer = -1" in line


# extends ---------------------------------------------------------------------------------------


def write(folder: Path, text: str, name: str = "gptfast.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


CHAIN = """
[profiles.base.train]
steps = 1
batch_size = 2
[profiles.base.plugins]
one = { size = 1, deep = 2 }
two = true

[profiles.middle]
extends = "base"
[profiles.middle.train]
steps = 3
[profiles.middle.plugins]
two = false
one = { size = 5 }

[profiles.child]
extends = "middle"
[profiles.child.train]
seed = 9
[profiles.child.plugins]
three = true
"""


def test_a_child_overrides_its_parents_and_each_value_knows_its_origin(tmp_path: Path) -> None:
    path = write(tmp_path, CHAIN)
    loaded = load("child", folder=tmp_path, overrides=["train.grad_clip=0.5"])
    train = loaded.profile.train
    assert (train.steps, train.batch_size, train.seed, train.grad_clip) == (3, 2, 9, 0.5)
    assert loaded.profile.plugins == {"one": {"size": 5, "deep": 2}, "three": {}}
    assert loaded.profile.name == "child"
    assert loaded.origins["train.batch_size"] == f"{path} [profiles.base]"
    assert loaded.origins["train.steps"] == f"{path} [profiles.middle]"
    assert loaded.origins["train.seed"] == f"{path} [profiles.child]"
    assert loaded.origins["train.grad_clip"] == "--set train.grad_clip=0.5:"
    assert "train.beta1" not in loaded.origins


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[profiles.a]\nextends = "b"\n[profiles.b]\nextends = "a"', "circle: a -> b -> a"),
        ('[profiles.a]\nextends = "a"', "extends itself"),
        ('[profiles.a]\nextends = "bc"\n[profiles.bcd]', "did you mean bcd?"),
        ("[profiles.a]\nextends = 3", "must be the name of a profile"),
        ("profiles = 3", "must be tables"),
        ("[profile.a]", "did you mean profiles?"),
        ("[profiles.a]\nplugins = 3", "plugins must be a table"),
        ("[profiles.a.plugins]\none = 3", "use true, false or a table"),
        ("[profiles.a]\nsteps = 3", "unknown key steps"),
    ],
)
def test_a_wrong_chain_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path, text)
    line = refusal(name="a", folder=tmp_path)
    assert said in line
    assert str(path) in line


def test_a_profile_may_extend_the_shipped_one_of_its_own_name(tmp_path: Path) -> None:
    write(
        tmp_path, '[profiles.baseline]\nextends = "baseline"\n[profiles.baseline.train]\nsteps = 7'
    )
    own = load("baseline", folder=tmp_path).profile
    shipped = load("baseline", folder=tmp_path / "elsewhere").profile
    assert own.train.steps == 7
    assert own.model == shipped.model


def test_an_unknown_profile_names_the_nearest(tmp_path: Path) -> None:
    """CLI-01."""
    assert "did you mean fast?" in refusal(name="fsat", folder=tmp_path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert "cannot be read" in refusal(config=tmp_path / "none.toml")


# switches and options --------------------------------------------------------------------------


def test_plugins_are_switched_from_the_command_line_with_the_profiles_options(
    tmp_path: Path,
) -> None:
    write(tmp_path, CHAIN)
    profile = load("child", folder=tmp_path, plugins=["four", "one"], without=["three"]).profile
    assert profile.plugins == {"one": {"size": 5, "deep": 2}, "four": {}}
    assert "it is not on: did you mean three?" in refusal(
        name="child", folder=tmp_path, without=["thre"]
    )


def test_a_setting_of_a_plugin_switches_it_on(tmp_path: Path) -> None:
    profile = load("baseline", folder=tmp_path, overrides=["plugins.a-b.size=3"]).profile
    assert profile.plugins["a-b"] == {"size": 3}


@pytest.mark.parametrize("override", ["train.steps", "=3", " =3", ""])
def test_a_setting_without_key_or_value_is_refused(override: str, tmp_path: Path) -> None:
    assert "write --set KEY=VALUE" in refusal(overrides=[override], folder=tmp_path)


@settings(deadline=None, max_examples=60)
@given(
    st.one_of(
        st.integers(-(2**62), 2**62),
        st.booleans(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(alphabet=st.characters(codec="ascii", categories=["L", "N"]), min_size=1).filter(
            lambda text: text not in ("true", "false", "inf", "nan") and not text[0].isdigit()
        ),
        st.lists(st.integers(0, 9), max_size=3),
    )
)
def test_a_setting_is_read_as_toml_and_else_as_text(value: Any) -> None:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    read = load("baseline", overrides=[f"plugins.one.option = {text}"]).profile
    assert read.plugins["one"] == {"option": value}
    assert type(read.plugins["one"]["option"]) is type(value)


# one profile -----------------------------------------------------------------------------------

TRAINS = st.builds(
    lambda batch, micro, **rest: {"batch_size": batch * micro, "micro_batch": micro, **rest},
    batch=st.integers(1, 64),
    micro=st.integers(1, 64),
    steps=st.integers(1, 10**9),
    seed=st.integers(0, 2**63 - 1),
    learning_rate=st.floats(1e-30, 1e30),
)


@settings(deadline=None, max_examples=60)
@given(
    TRAINS,
    st.dictionaries(
        st.sampled_from(["one", "a-b", "c.d", 'q"uote', "naïve"]),
        st.dictionaries(st.text(min_size=1, max_size=5), st.integers(0, 5), max_size=3),
    ),
)
def test_a_profile_written_and_read_is_the_same(
    tmp_path_factory: pytest.TempPathFactory, train: dict[str, Any], plugins: dict[str, Any]
) -> None:
    profile = Profile.model_validate(
        {
            "name": "other",
            "train": train,
            "plugins": plugins,
            "data": {"path": "/data/x.h5"},
            "model": {"preset": "char-small", "n_layer": 3, "vocab_size": 65},
            "unsupported_plugins": "skip",
        }
    )
    folder = tmp_path_factory.mktemp("round")
    path = folder / "profile.toml"
    path.write_text(profile.to_toml(), encoding="utf-8")
    read = load(config=path, folder=folder).profile
    assert read.model_dump(exclude={"name"}) == profile.model_dump(exclude={"name"})


def test_a_preset_gives_the_shape_and_keys_beside_it_win() -> None:
    model = Profile.model_validate({"model": {"preset": "gpt2-medium", "n_layer": 3}}).model
    assert (model.n_layer, model.n_head, model.n_embd) == (3, 16, 1024)
    for preset, shape in PRESETS.items():
        found = Profile.model_validate({"model": {"preset": preset}}).model.model_dump()
        assert {key: found[key] for key in shape} == shape


def test_replacing_validates_again_and_leaves_the_old_one() -> None:
    profile = Profile.model_validate({"train": {"batch_size": 6}})
    changed = profile.replace({"train.micro_batch": 3, "model.attention": "sdpa"})
    assert (changed.train.n_micro, changed.model.attention) == (2, "sdpa")
    assert profile.train.micro_batch is None
    with pytest.raises(Refused, match="micro_batch = 4 does not divide batch_size = 6"):
        profile.replace({"train.micro_batch": 4})
    with pytest.raises(Refused, match=r"unknown key train\.stepz"):
        profile.replace({"train.stepz": 4})


def test_a_profile_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Profile().train.steps = 3  # that is the point


def test_every_key_of_a_profile_is_explained() -> None:
    for table in (TrainConfig, type(Profile().model), type(Profile().data), Profile):
        undocumented = [name for name, f in table.model_fields.items() if not f.description]
        assert not set(undocumented) - {"model", "data", "train"}, table


@given(st.text(max_size=20), st.lists(st.text(min_size=1, max_size=20), max_size=5))
def test_the_nearest_name_is_one_of_the_known(word: str, known: list[str]) -> None:
    said = nearest(word, known)
    if said.startswith("did you mean"):
        assert any(said == f"did you mean {name}?" for name in known)
    else:
        assert said == ("choose from " + ", ".join(sorted(known)) if known else "there is none")


# shipped profiles ------------------------------------------------------------------------------


def test_the_shipped_profiles_are_there_and_valid(tmp_path: Path) -> None:
    assert shipped_config().exists()
    shipped = names(folder=tmp_path)
    assert {"baseline", "fast", "quick", "gpt2-124m", "char", "speedrun"} <= set(shipped)
    for name in shipped:
        profile = load(name, folder=tmp_path).profile
        assert profile.name == name
        assert profile.unsupported_plugins == "skip"
        assert Path(profile.data.path).is_absolute()
        assert math.isfinite(profile.train.learning_rate)
    assert load("baseline", folder=tmp_path).profile.plugins == {}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("extends=char", "extends is said in a file only"),
        ("name=../../evil", "name is said in a file only"),
        ("train=3", "should be a table: write train.KEY = VALUE"),
        ("train.steps=1\nfoo=3", "should be a valid integer"),
    ],
)
def test_an_override_that_would_do_something_else_is_refused(override: str, said: str) -> None:
    with pytest.raises(Refused, match=said):
        load("baseline", overrides=[override])


def test_a_name_in_a_file_is_no_path(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text('name = "../evil"\n', encoding="utf-8")
    with pytest.raises(Refused, match=r"name = '\.\./evil'"):
        load(config=path)
