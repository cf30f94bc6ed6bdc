"""Where lmoffload keeps things: the one place that reads the user's surroundings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Settings:
    """Directories of this user. They follow the platform's conventions (XDG_DATA_HOME and XDG_CACHE_HOME on Linux) and are created by
    whoever first writes there."""

    data_directory: Path
    """What was measured: machine profiles."""
    cache_directory: Path
    """What can be made again."""

    @staticmethod
    def of_user() -> Settings:
        """The settings of the user who runs this process, read anew at each call."""
        from platformdirs import PlatformDirs

        directories = PlatformDirs("lmoffload", appauthor=False)
        return Settings(Path(directories.user_data_dir), Path(directories.user_cache_dir))
