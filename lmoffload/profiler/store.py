"""Where profiles are kept: this machine's in the user's data directory, other machines' in the package."""

from __future__ import annotations

import os
from contextlib import suppress
from importlib import resources
from pathlib import Path

from lmoffload.documents import write_whole
from lmoffload.settings import Settings
from lmoffload_solver.errors import StatedError
from lmoffload_solver.machine import MachineProfile
from lmoffload_solver.value import parse_value, read_value


def default_profile_path() -> Path:
    """The file of this machine's own profile."""
    return Settings.of_user().data_directory / "machine.json"


def save_profile(profile: MachineProfile, path: Path | None = None) -> Path:
    """Write a profile, whole or not at all; returns its path (by default this machine's own).

    Raises:
        StatedError: it cannot be written there.
    """
    target = default_profile_path() if path is None else path
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StatedError(f"The profile cannot be written to {target}: {error.strerror or error}.") from error
    write_whole(target, profile.model_dump_json(indent=2) + "\n", "profile")
    return target


def load_profile(source: str | Path | None = None) -> MachineProfile:
    """A profile: this machine's own (None), one of a file, or a packaged one by name.

    Raises:
        StatedError: there is none, or it is not a valid profile.
    """
    if source is None:
        path = default_profile_path()
        if not path.exists():
            raise StatedError("This machine has no profile yet; run `lmoffload profile`.")
        try:
            return read_value(MachineProfile, path, "machine profile")
        except StatedError as error:
            raise StatedError(f"{str(error).rstrip('.')}; run `lmoffload profile` to measure this machine anew.") from error
    text = os.fspath(source)
    if isinstance(source, Path) or text.endswith(".json") or os.sep in text or Path(text).is_file():
        return read_value(MachineProfile, Path(text), "machine profile")
    packaged = _packaged()
    if text not in packaged:
        known = ", ".join(sorted(packaged)) or "none"
        raise StatedError(f"There is no machine profile {text!r}: it is neither a file nor one of the packaged ones ({known}).")
    return parse_value(MachineProfile, packaged[text], f"packaged machine profile {text}")


def _packaged() -> dict[str, str]:
    """Texts of the packaged profiles by name: inside lmoffload_solver in a wheel, beside the packages in a checkout."""
    found: dict[str, str] = {}
    checkout = Path(__file__).resolve().parents[2] / "profiles"
    for folder in (resources.files("lmoffload_solver") / "profiles", checkout):
        with suppress(OSError):
            for entry in folder.iterdir():
                if entry.name.endswith(".json"):
                    found.setdefault(entry.name.removesuffix(".json"), entry.read_text(encoding="utf-8"))
    return found
