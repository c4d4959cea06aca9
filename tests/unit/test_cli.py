from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from rollspan import cli, flags, models, serve
from rollspan.config import EngineConfig
from rollspan.frontend.__main__ import _parser as frontend_parser
from rollspan.launcher import Frontend
from rollspan.version import __version__


def exit_code(arguments: list[str]) -> int:
    try:
        return cli.main(arguments)
    except SystemExit as error:
        return int(error.code or 0)


def parsed(*arguments: str) -> dict[str, object]:
    parser = flags.Parser(prog="test")
    flags.add_engine_flags(parser)
    flags.add_set_flags(parser)
    flags.add_frontend_flags(parser)
    return vars(parser.parse_args(arguments))


def test_help_names_every_command_and_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in cli.COMMANDS)
    assert "examples:" in text


@pytest.mark.parametrize("command", ["serve", "engine"])
def test_each_command_explains_itself_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code([command, "--help"]) == 0
    assert f"rollspan {command}" in capsys.readouterr().out.split("examples:")[1]


def test_no_command_prints_the_help_and_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code([]) == 2
    assert "commands:" in capsys.readouterr().err


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["--version"]) == 0
    assert capsys.readouterr().out == f"rollspan {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["sreve"], 2, "invalid choice: 'sreve'"),
        (["serve", "--prot", "1"], 2, "unrecognized arguments: --prot"),
        (["serve", "--port", "http"], 2, "argument --port: invalid int value: 'http'"),
        (["serve", "--data-parallel-size", "0"], 2, "must be an integer of at least 1"),
        (["serve", "--dtype", "int4"], 2, "argument --dtype: invalid choice: 'int4'"),
        (["serve", "--max-num-seqs", "0"], 2, "max_num_seqs must be an integer of at least 1, got 0"),
        (["serve", "--weight-version", ""], 2, "weight_version must be a string of 1 to 256 bytes"),
        (["serve", "/no/such/model"], 1, "'/no/such/model'"),
        (["engine"], 2, "the following arguments are required: --socket"),
    ],
)
def test_a_mistake_is_told_in_one_line(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(arguments) == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("rollspan")
    assert message in lines[0]


def test_every_field_of_the_engine_config_is_a_flag() -> None:
    values = {"model": "add2-sft", "dtype": "bfloat16", "device": "cpu", "engine_index": "6"}
    arguments = ["add2-sft"]
    for field in dataclasses.fields(EngineConfig):
        if field.metadata.get("positional"):
            continue
        flag = "--" + field.name.replace("_", "-")
        value = values.get(field.name, field.metadata.get("choices", ["7"])[-1])
        arguments += [flag] if "bool" in str(field.type) else [flag, value]
    config = flags.engine_config(flags.Parser(), parsed(*arguments))
    assert config.model == str(models.path("add2-sft"))
    assert (config.block_size, config.weight_version, config.dtype) == (7, "7", "bfloat16")
    assert config == EngineConfig.from_json(config.to_json())


def test_without_flags_the_configuration_is_the_default_on_the_embedded_model() -> None:
    assert flags.engine_config(flags.Parser(), parsed()) == EngineConfig(model=str(models.path()))


def test_the_frontend_gets_what_was_given_and_keeps_its_other_defaults() -> None:
    given = parsed("--port", "0", "--strict-requests", "--seed", "3")
    arguments = flags.frontend_arguments(given)
    assert arguments == ["--port", "0", "--strict-requests", "--shutdown-timeout", "5.0", "--log-level", "info"]


def test_the_frontend_understands_every_flag() -> None:
    words = {"--log-level": "debug", "--host": "localhost"}
    arguments = ["--engine", "engine.sock", "--watch-stdin"]
    for flag, options in flags.FRONTEND_FLAGS:
        arguments += [flag] if options.get("action") else [flag, words.get(flag, "1")]
    frontend_parser().parse_args(arguments)


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["serve", "/no/such/model"]])
def test_the_launcher_never_imports_torch_or_a_web_framework(arguments: list[str]) -> None:
    program = (
        "import sys\nfrom rollspan.cli import main\n"
        f"try: main({arguments!r})\nexcept SystemExit: pass\n"
        "print([name for name in ('torch', 'transformers', 'numpy', 'starlette', 'uvicorn') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"


def test_the_banner_tells_where_and_how(capsys: pytest.CaptureFixture[str]) -> None:
    config = EngineConfig(model="/models/qwen")
    banner = serve.Banner(config, Frontend("rust", ("rollspan-http",), "found"), events=True)
    banner({"event": "listening", "address": "127.0.0.1:8123"})
    banner({"event": "ready"})
    ended = {"event": "engine_ended", "engine_index": 1, "message": "engine 1 was killed", "restart_seconds": 2.0}
    banner(ended)
    output = capsys.readouterr()
    url = "http://127.0.0.1:8123"
    assert [json.loads(line) for line in output.out.splitlines()] == [
        {"event": "listening", "url": url},
        {"event": "ready", "url": url},
        {**ended, "url": url},
    ]
    assert "engine 1 was killed; it is started again in 2 s" in output.err
    assert f"ready: qwen at {url} through the rust frontend" in output.err
    assert f"curl {url}/inference/v1/generate" in output.err
