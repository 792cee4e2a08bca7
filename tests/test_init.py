"""Specs from config.json files: what is read, what is refused, and what is written."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mhcgen import cli, hf_config, text_file
from mhcgen.build import BuildError
from mhcgen.errors import MhcgenError, PlanError, Problem
from mhcgen.hf_config import FIELDS, read_config
from mhcgen.json_source import parse_json
from mhcgen.resources import resource
from mhcgen.spec import TP_SIZES, Spec
from mhcgen.spec_file import load_spec
from mhcgen.text_file import write_whole

CONFIGS = Path(__file__).parent / "configs"
V4 = CONFIGS / "deepseek_v4_flash.json"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Runs mhcgen init in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["mhcgen", "init", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return run


@pytest.fixture
def edited(tmp_path: Path) -> Callable[..., Path]:
    """Writes a config that differs from that of DeepSeek-V4-Flash."""

    def edited(without: tuple[str, ...] = (), **changes: object) -> Path:
        content = json.loads(V4.read_text()) | changes
        for key in without:
            del content[key]
        path = tmp_path / "config.json"
        path.write_text(json.dumps(content, indent=2))
        return path

    return edited


def refusal(path: Path, tp: int = 4, **options: Any) -> str:
    """What is said of a config that is refused, in single spaces."""
    with pytest.raises(MhcgenError) as caught:
        read_config(path, tp, **options)
    return " ".join(str(caught.value).split())


# What is read


@pytest.mark.parametrize(
    ("config", "pre_mix", "name"),
    [
        ("glm_5_3_flash", None, "glm53"),
        ("deepseek_v4_flash", None, "dsv4_flash_tp4"),
        ("deepseek_v4_pro", None, "dsv4_pro_tp4"),
        ("deepseek_v4_1_flash", "delayed", "dsv41_flash_tp4"),
    ],
)
def test_models(config: str, pre_mix: str | None, name: str) -> None:
    """A config gives what the shipped spec of the model says."""
    shipped = load_spec(resource("specs") / f"{name}.yaml").spec
    made = read_config(CONFIGS / f"{config}.json", 4, name, pre_mix).spec
    for section in ("name", "model", "parallel", "capacity", "moe", "precision"):
        assert getattr(made, section) == getattr(shipped, section)


def test_table_names_values_of_specs() -> None:
    for field in FIELDS:
        properties = Spec.model_json_schema()["$defs"][field.loc[0].capitalize()]
        assert field.loc[1] in properties["properties"]


def test_origins() -> None:
    values = read_config(CONFIGS / "glm_5_3_flash.json", 2).values
    origins = {".".join(value.loc): value.origin for value in values}
    assert origins == {
        "model.hidden": "text_config.hidden_size",
        "model.hc": "text_config.hc_mult",
        "model.rms_eps": "text_config.rms_norm_eps",
        "model.hc_eps": "text_config.hc_eps",
        "model.norm_eps": "text_config.rms_norm_eps",
        "model.post_mult": "default",
        "model.sinkhorn_iters": "text_config.hc_sinkhorn_iters",
        "model.pre_mix": "default",
        "parallel.tp": "--tp",
        "capacity.max_tokens": "default",
        "moe.top_k": "text_config.num_experts_per_tok",
        "moe.shared_expert": "text_config.n_shared_experts",
        "precision.activation": "text_config.dtype",
        "precision.fn_weight": "default",
    }


def test_top_level_serves_what_the_section_lacks(edited: Callable[..., Path]) -> None:
    section = {"hidden_size": 2048, "hc_mult": None}
    spec = read_config(edited(text_config=section), 4).spec
    assert (spec.model.hidden, spec.model.hc) == (2048, 4)


def test_section_that_is_no_object_is_left_alone(edited: Callable[..., Path]) -> None:
    assert read_config(edited(text_config=[1, 2]), 4).spec.model.hidden == 4096


def test_repeated_key_is_refused_with_its_line(edited: Callable[..., Path]) -> None:
    path = edited()
    path.write_text('{"hidden_size": 7, ' + path.read_text().lstrip()[1:])
    said = refusal(path)
    assert ": hidden_size: a repeated key remove one; the first is on line 1" in said


def test_model_without_experts(edited: Callable[..., Path]) -> None:
    made = read_config(edited(num_experts_per_tok=None), 4)
    assert made.spec.moe is None
    assert "moe" not in made.text_in(Path())


@pytest.mark.parametrize(
    ("experts", "shared"), [(0, "never"), (1, "optional"), (2, "optional")]
)
def test_shared_expert(experts: int, shared: str, edited: Callable[..., Path]) -> None:
    moe = read_config(edited(n_shared_experts=experts), 4).spec.moe
    assert moe is not None and moe.shared_expert == shared


def test_without_a_shared_expert(edited: Callable[..., Path]) -> None:
    moe = read_config(edited(("n_shared_experts",)), 4).spec.moe
    assert moe is not None and moe.shared_expert == "never"


def test_aliases(edited: Callable[..., Path]) -> None:
    path = edited(
        ("num_experts_per_tok", "n_shared_experts", "torch_dtype"),
        num_experts_per_token=5,
        num_shared_experts=0,
        dtype="bfloat16",
    )
    moe = read_config(path, 4).spec.moe
    assert moe is not None and (moe.top_k, moe.shared_expert) == (5, "never")


def test_unknown_model_type_is_noted(edited: Callable[..., Path]) -> None:
    first, second = read_config(edited(model_type="other"), 4).notes
    assert "other is not one of deepseek_v4, glm5_next" in first
    assert "--pre-mix delayed" in second
    assert read_config(V4, 4).notes == ()
    without = read_config(edited(("model_type",)), 4)
    assert "(none)" in without.notes[0]
    assert without.spec.name == "model_tp4"


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("DeepSeek-V4", "deepseek_v4_tp2"),
        ("4_v", "v_tp2"),
        ("é", "model_tp2"),
        ("x" * 90, "x" * 40 + "_tp2"),
    ],
)
def test_names(model_type: str, name: str, edited: Callable[..., Path]) -> None:
    assert read_config(edited(model_type=model_type), 2).spec.name == name


# What is refused


def test_model_without_hyper_connections() -> None:
    assert refusal(CONFIGS / "llama.json").endswith(
        "llama.json: model type llama has no manifold-constrained hyper-connections "
        "looked for hc_mult, hc_sinkhorn_iters, hc_eps at the top"
    )


def test_other_hyper_connections_lack_the_iterations(
    edited: Callable[..., Path],
) -> None:
    path = edited(("hc_sinkhorn_iters",), model_type="hy_v4")
    assert "hc_sinkhorn_iters: missing looked for it at the top" in refusal(path)


def test_missing_keys_are_named_together(edited: Callable[..., Path]) -> None:
    text = refusal(edited(("hidden_size", "hc_mult", "rms_norm_eps"), text_config={}))
    for key in ("hidden_size", "hc_mult", "rms_norm_eps"):
        assert text.count(f"{key}: missing looked for it in text_config and") == 1


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hidden_size": 4097}, "hidden_size: not a multiple of 8 given 4097"),
        ({"hidden_size": "4096"}, '"4096"; allowed: a multiple of 8 from 64 to 16384'),
        ({"hidden_size": 4096.0}, "hidden_size: not a whole number given 4096.0"),
        ({"hidden_size": [4096]}, "hidden_size: not a whole number given a list of 1"),
        ({"hidden_size": {}}, "not a whole number given an object of 0 keys"),
        ({"hidden_size": 10**30}, "too large given 1" + "0" * 30),
        ({"hc_mult": True}, "hc_mult: not a whole number given true"),
        ({"hc_mult": 3}, "given 3; allowed: 1, 2, 4 or 8; nearest: 2, 4"),
        ({"hc_eps": 0.0}, "hc_eps: too small given 0.0"),
        ({"rms_norm_eps": -1}, "rms_norm_eps: too small given -1"),
        ({"hc_sinkhorn_iters": False}, "hc_sinkhorn_iters: not a whole number"),
        ({"num_experts_per_tok": 33}, "given 33; allowed: a whole number from 1 to 32"),
        ({"n_shared_experts": True}, "allowed: a whole number, 0 or more"),
        ({"n_shared_experts": -1}, "given -1; allowed: a whole number, 0 or more"),
        ({"torch_dtype": "float32"}, '"float32"; allowed: bfloat16 or float16'),
        ({"torch_dtype": ["bfloat16"]}, "torch_dtype: not one of the choices"),
    ],
)
def test_wrong_values(
    changes: dict[str, object], expected: str, edited: Callable[..., Path]
) -> None:
    path = edited(**changes)
    key = next(iter(changes))
    lines = path.read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if f'"{key}"' in text)
    text = refusal(path)
    assert expected in text
    assert text.count(f"config.json:{line}:") == 1


def test_infinite_value(edited: Callable[..., Path]) -> None:
    path = edited()
    path.write_text(path.read_text().replace('"hc_eps": 1e-06', '"hc_eps": 1e999'))
    assert "hc_eps: not a finite number given 1e999" in refusal(path)


def test_all_that_is_wrong_is_told(edited: Callable[..., Path]) -> None:
    path = edited(text_config={"hidden_size": "x"}, hc_eps=1)
    text = refusal(path, 3, name="No", pre_mix="old")
    assert "text_config.hidden_size: not a whole number" in text
    assert "hc_eps: too large" in text
    assert "--name: not of the right form given No;" in text
    assert "--tp: not one of the choices given 3; allowed: 1, 2, 4, 8 or 16;" in text
    assert "--pre-mix: not one of the choices given old; allowed: fresh or" in text


def test_what_no_plan_serves_is_refused(
    edited: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(spec: Spec) -> None:
        problems = [Problem(("model", "hidden"), "no cluster"), Problem((), "no more")]
        raise PlanError(problems)

    monkeypatch.setattr(hf_config, "make_plan", refuse)
    text = refusal(edited())
    assert "config.json:13:18: hidden_size: no cluster" in text
    assert "config.json: no more" in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "config.json:1:1: the file is empty"),
        ('{"a": 1,\n "b": }', "config.json:2:7: not JSON: Expecting value"),
        ('{"a": 1,}', "not JSON:"),
        ("{} {}", "config.json:1:4: not JSON: Extra data"),
        ('{"a": NaN}', "config.json:1:7: not JSON: NaN is no JSON number"),
        ('{"a":\n-Infinity}', "config.json:2:1: not JSON: -Infinity is no JSON number"),
        ("[" * 100_000, "not JSON: too many levels"),
        (
            '{"a": ' + "9" * 5000 + "}",
            "config.json:1:7: a number of 5000 characters given 999",
        ),
        ("[1]", "config.json:1:1: no config of a model given a list of 1"),
        ("7", "no config of a model given 7; allowed: an object"),
    ],
)
def test_broken_json(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    assert expected in refusal(path)


@pytest.mark.parametrize("kind", ["x" * 10_000, "\x1b[31m"])
def test_odd_model_types_leave_the_terminal_alone(
    edited: Callable[..., Path], kind: str
) -> None:
    note, _ = read_config(edited(model_type=kind), 4).notes
    assert note.isprintable() and len(note) < 200
    without = dict.fromkeys(["hc_mult", "hc_eps", "hc_sinkhorn_iters"])
    text = refusal(edited(model_type=kind, **without))
    assert "has no manifold-constrained" in text
    assert "\x1b" not in text and len(text) < 500


def test_what_is_no_config_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\x80\x02}q\x00")
    assert "config.json:1:1: not UTF-8 text" in refusal(tmp_path / "config.json")
    text = refusal(tmp_path)
    assert "a directory, not a file it holds config.json" in text
    assert "did you mean config.json?" in refusal(tmp_path / "confg.json")
    (tmp_path / "empty").mkdir()
    assert f"{tmp_path}/empty holds no *.json" in refusal(tmp_path / "empty/a.json")


def test_large_file(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(" " * 300_000)
    assert "too large for a config" in refusal(tmp_path / "model.json")


def test_positions_of_values() -> None:
    text = '{"a":\t[1, {"b": "\\"}"}],\r\n  "c": {"d": -1.5e3, "e": {}}, "f": []}'
    root = parse_json(Path("x"), text)
    assert root.data() == json.loads(text)
    assert root.nearest(("a", 1, "b"))[0].start == (1, 17)
    assert root.nearest(("c", "d"))[0].start == (2, 14)
    assert root.nearest(("c", "d"))[0].written == "-1.5e3"
    assert root.locate_key(("f",)) == (2, 32)


# What is written


@pytest.mark.parametrize("tp", TP_SIZES[1:4])
@pytest.mark.parametrize("config", ["deepseek_v4_flash", "glm_5_3_flash"])
def test_round_trip(config: str, tp: int, run: Run, tmp_path: Path) -> None:
    made = read_config(CONFIGS / f"{config}.json", tp)
    code, out, err = run(CONFIGS / f"{config}.json", "--tp", tp)
    assert (code, err) == (0, "")
    path = tmp_path / f"{made.spec.name}.yaml"
    assert out.endswith(f"\n{made.spec.name}: written to {path.name}\n")
    assert load_spec(path).spec == made.spec
    text = path.read_text()
    assert text.startswith("# Made by")
    for value in made.values:
        assert f"  {value.loc[1]}: " in text and f"  # {value.origin}\n" in text
    assert list(tmp_path.iterdir()) == [path]


def test_table_of_origins(run: Run) -> None:
    _, out, _ = run(V4, "--tp", 8, "--name", "mine", "--out", "spec.yaml")
    lines = [line.split() for line in out.splitlines()]
    assert ["model.hidden", "4096", "hidden_size"] in lines
    assert ["parallel.tp", "8", "--tp"] in lines
    assert ["model.post_mult", "2.0", "default"] in lines


def test_notes_are_shown(run: Run, edited: Callable[..., Path]) -> None:
    _, out, _ = run(edited(model_type="other"), "--tp", 8)
    assert "\nnote: model type other is not one of " in out


def test_name_of_a_config_cannot_end_the_comment(tmp_path: Path) -> None:
    path = tmp_path / "a\nname: b.json"
    path.write_text(V4.read_text())
    made = read_config(path, 4)
    (tmp_path / "spec.yaml").write_text(made.text_in(tmp_path))
    assert load_spec(tmp_path / "spec.yaml").spec == made.spec


def test_a_spec_is_not_replaced_unasked(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("mine\n")
    code, out, err = run(V4, "--tp", 4, "--out", "mine.yaml")
    assert (code, out) == (2, "")
    assert "mine.yaml is there already" in err and "--force" in err
    assert (tmp_path / "mine.yaml").read_text() == "mine\n"
    assert run(V4, "--tp", 4, "--out", "mine.yaml", "--force")[0] == 0
    assert load_spec(tmp_path / "mine.yaml").spec.parallel.tp == 4


def test_a_refused_config_writes_nothing(run: Run, tmp_path: Path) -> None:
    code, out, err = run(CONFIGS / "llama.json", "--tp", 4)
    assert (code, out) == (2, "")
    assert "model type llama has no manifold-constrained" in err
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written(run: Run, tmp_path: Path) -> None:
    code, _, err = run(V4, "--tp", 4, "--out", "none/mine.yaml")
    assert code == 2
    assert err == (
        "--out none/mine.yaml: there is no folder none; make it, or name a file "
        "elsewhere\n"
    )
    (tmp_path / "folder").mkdir()
    code, _, err = run(V4, "--tp", 4, "--out", "folder")
    assert (code, err) == (2, "--out folder: is a folder: name a file\n")
    code, _, err = run(V4, "--tp", 4, "--name", "")
    assert code == 2
    assert err.startswith("--name: ")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_the_schema_is_named_where_it_is(run: Run, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text("{}")
    run(V4, "--tp", 4, "--out", "mine.yaml")
    first, second, *_ = (tmp_path / "mine.yaml").read_text().splitlines()
    assert first == "# yaml-language-server: $schema=schema.json"
    assert second.startswith("# Made by")


def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    text_file.check_place("--json", path)
    write_whole(path, "text")
    assert os.read(reader, 9) == b"text"
    os.close(reader)
    assert path.is_fifo()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_write_that_fails_leaves_nothing_new(
    overwrite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "spec.yaml"
    if overwrite:
        path.write_text("old")
    monkeypatch.setattr(text_file.Path, "replace", fail)
    with pytest.raises(BuildError, match="No space left"):
        write_whole(path, "new", overwrite)
    assert [p.read_text() for p in tmp_path.iterdir()] == ["old"] * overwrite


def test_a_link_stays(tmp_path: Path) -> None:
    (tmp_path / "real.yaml").write_text("old")
    (tmp_path / "link.yaml").symlink_to("real.yaml")
    write_whole(tmp_path / "link.yaml", "new")
    assert (tmp_path / "link.yaml").is_symlink()
    assert (tmp_path / "real.yaml").read_text() == "new"
