"""Flags, environment and file: who wins, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocm_serve.config import load
from rocm_serve.errors import UserError


def write(folder: Path, text: str) -> Path:
    path = folder / "serve.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = write(tmp_path, 'model = "from-file"\nport = 1\ntp = 2\npage-size = 32\n')
    config = load.load({"port": 3}, file, {"ROCM_SERVE_PORT": "2", "ROCM_SERVE_TP": "4", "HOME": "x"})
    assert (config.model, config.port, config.tp, config.page_size, config.pp) == ("from-file", 3, 4, 32, 1)


def test_a_file_may_write_keys_with_dashes_or_underscores(tmp_path: Path) -> None:
    dashes = load.load({}, write(tmp_path, 'model = "m"\nmax-model-len = 7\n'), {})
    lines = load.load({}, write(tmp_path, 'model = "m"\nmax_model_len = 7\n'), {})
    assert dashes == lines
    assert dashes.max_model_len == 7


def test_ops_come_from_a_table_and_from_pairs(tmp_path: Path) -> None:
    table = load.load({}, write(tmp_path, 'model = "m"\n[op]\nmoe_experts = "reference"\n'), {})
    pairs = load.load({"model": "m", "op": load.parse_ops(["moe_experts=reference"])}, None, {})
    environ = load.load({"model": "m"}, None, {"ROCM_SERVE_OP": "moe_experts=reference"})
    assert table.op == pairs.op == environ.op == {"moe_experts": "reference"}


@pytest.mark.parametrize("pair", ["x", "=y", "x=", ""])
def test_an_op_without_a_provider_is_refused(pair: str) -> None:
    with pytest.raises(UserError, match="OP=PROVIDER"):
        load.parse_ops([pair])


def test_one_op_with_two_providers_is_refused() -> None:
    with pytest.raises(UserError, match="twice"):
        load.parse_ops(["a=b", "a=c"])


def test_an_unknown_key_is_refused_by_name_with_the_nearest_known_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown key 'prot'; did you mean 'port'\?"):
        load.load({}, write(tmp_path, 'model = "m"\nprot = 1\n'), {})


def test_an_unknown_variable_with_our_prefix_is_refused() -> None:
    with pytest.raises(UserError, match="environment: unknown key 'max_len'"):
        load.load({"model": "m"}, None, {"ROCM_SERVE_MAX_LEN": "1"})


KUBERNETES = {
    "SERVICE_HOST": "10.0.171.239",
    "SERVICE_PORT": "8000",
    "SERVICE_PORT_HTTP": "8000",
    "PORT": "tcp://10.0.171.239:8000",
    "PORT_8000_TCP": "tcp://10.0.171.239:8000",
    "PORT_8000_TCP_PROTO": "tcp",
    "PORT_8000_TCP_PORT": "8000",
    "PORT_8000_TCP_ADDR": "10.0.171.239",
}


@pytest.mark.parametrize("service", ["ROCM_SERVE_", "ROCM_SERVE_CANARY_"])
def test_what_kubernetes_sets_for_a_service_of_our_name_is_passed_over(service: str) -> None:
    environ = {service + name: value for name, value in KUBERNETES.items()}
    assert load.load({"model": "m"}, None, environ | {"ROCM_SERVE_TP": "2"}) == load.load(
        {"model": "m", "tp": 2}, None, {}
    )
    v6 = {service + "SERVICE_HOST": "fd00::1", service + "PORT": "tcp://[fd00::1]:8000"}
    assert load.load({"model": "m"}, None, v6) == load.load({"model": "m"}, None, {})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SERVICE_HOST", "my host"),
        ("SERVICE_PORT", "eighty"),
        ("PORT", "http://10.0.0.1:80"),
        ("PORT", "tcp://10.0.0.1"),
        ("PORT_80_TCP_PROTO", "8000"),
        ("SERVICE_HOSTS", "10.0.0.1"),
    ],
)
def test_what_only_resembles_it_is_refused(name: str, value: str) -> None:
    with pytest.raises(UserError, match="environment: "):
        load.load({"model": "m"}, None, {f"ROCM_SERVE_{name}": value})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('port = "80"', "--port '80': legal: a whole number"),
        ("port = 1.5", "--port 1.5: legal: a whole number"),
        ("tp = true", "--tp True: legal: a whole number"),
        ('device = "tpu"', "--device 'tpu': legal: auto, cpu, cuda, rocm"),
        ('mem-fraction = "all"', "--mem-fraction 'all': legal: a number"),
        ("enforce-eager = 1", "--enforce-eager 1: legal: true or false"),
        ("op = 3", "--op 3: legal: pairs of op and provider"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_with_the_legal_ones(tmp_path: Path, text: str, message: str) -> None:
    file = write(tmp_path, f'model = "m"\n{text}\n')
    with pytest.raises(UserError) as refused:
        load.load({}, file, {})
    assert str(refused.value) == f"{file}: {message}"


def test_files_and_variables_have_our_names_only(tmp_path: Path) -> None:
    file = write(tmp_path, 'model-path = "m"')
    with pytest.raises(UserError) as refused:
        load.load({}, file, {})
    assert str(refused.value) == f"{file}: 'model_path' is called 'model' here"
    with pytest.raises(UserError, match="environment: 'tp_size' is called 'tp' here"):
        load.load({"model": "m"}, None, {"ROCM_SERVE_TP_SIZE": "2"})


def test_a_broken_or_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not TOML"):
        load.load({}, write(tmp_path, "model = "), {})
    with pytest.raises(UserError, match="No such file"):
        load.load({}, tmp_path / "absent.toml", {})


def test_no_model_is_refused() -> None:
    with pytest.raises(UserError, match="--model DIR"):
        load.load({}, None, {})


def test_choices_lists_the_words_of_a_field() -> None:
    assert load.choices("dtype") == ("auto", "bfloat16", "float32")
    assert load.choices("port") == ()


def test_defaults_for_libraries_yield_to_what_the_user_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    load.set_library_defaults()
    assert load.environment()["OMP_WAIT_POLICY"] == "ACTIVE"
    monkeypatch.delenv("OMP_WAIT_POLICY")
    assert load.environment()["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.delenv("MKL_CBWR", raising=False)
    assert load.environment()["MKL_CBWR"] == "AUTO,STRICT"
