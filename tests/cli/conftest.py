"""An isolated home with this machine's profile in it, a tiny model with a tokenizer, and the program called in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lmoffload.checkpoint.dummy_tokenizer import write_tokenizer
from lmoffload.cli.main import main
from lmoffload.profiler.limits import disk_of
from lmoffload.profiler.store import default_profile_path, save_profile
from tests.cli.machines import machine
from tests.models import tiny_checkpoint

VOCAB_SIZE = 300
CHAT_TEMPLATE = "{{ '<s>' }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}[assistant]"


@dataclass(frozen=True)
class Called:
    """What one call of the program gave."""

    code: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """The last remark: the error's one sentence."""
        return self.err.strip().splitlines()[-1]


Call = Callable[..., Called]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, without a profile; the current folder is empty."""
    folder = tmp_path / "home"
    for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(folder / name.lower()))
    place = tmp_path / "work"
    place.mkdir()
    monkeypatch.chdir(place)
    return folder


@pytest.fixture
def profiled(home: Path) -> Path:
    """The home with a profile of this machine, made by hand."""
    save_profile(machine(file_system=disk_of(Path.cwd()).mount_point), default_profile_path())
    return home


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Iterator[Call]:
    """Calls the program in this process."""

    def run(*arguments: str | Path) -> Called:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Called(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer and a chat template. No token ends its text."""
    return make_model(tmp_path_factory.mktemp("models") / "tiny-llama")


def make_model(folder: Path, seed: int = 0) -> Path:
    """A tiny Llama in `folder`."""
    tiny_checkpoint("llama", folder, vocab_size=VOCAB_SIZE, seed=seed)
    write_tokenizer(folder, VOCAB_SIZE)
    config_file = folder / "tokenizer_config.json"
    config = json.loads(config_file.read_text(encoding="utf-8")) | {"chat_template": CHAT_TEMPLATE}
    config_file.write_text(json.dumps(config), encoding="utf-8")
    return folder


def files_below(folder: Path) -> set[Path]:
    """Every file below a folder."""
    return {path for path in folder.rglob("*") if path.is_file()}
