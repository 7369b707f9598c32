"""Our `msrun` and `torchrun`. Standard library only, started with `python -I -S`, so that no setting of the script reaches it.

The first argument says which of them it is. Mode `capture`: appends the call to a file and says that all went well. Mode
`activate`: dry-runs the call. Anything else: hands over to the next one on PATH, so that a shell with a stale PATH still works.
"""

import json
import os
import sys
from pathlib import Path


def main(launcher: str, arguments: list) -> int:  # type: ignore[type-arg]
    """Acts on the activation in MINDSPEED_DRYRUN."""
    try:
        config = json.loads(os.environ.get("MINDSPEED_DRYRUN") or "{}")
    except ValueError:
        config = {}
    if config.get("mode") == "capture":
        return capture(config["file"], launcher, arguments)
    if config.get("mode") == "activate":
        return activate(config, launcher, arguments)
    return next_on_path(launcher, arguments)


def capture(file: str, launcher: str, arguments: list) -> int:  # type: ignore[type-arg]
    """One call, one line. O_APPEND keeps two calls at once apart."""
    call = {"program": launcher, "argv": arguments, "cwd": str(Path.cwd()), "env": dict(os.environ)}
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, (json.dumps(call) + "\n").encode("utf-8", "surrogatepass"))
    os.close(descriptor)
    return 0


def activate(config: dict, launcher: str, arguments: list) -> int:  # type: ignore[type-arg]
    """Becomes the dry run of this call."""
    root = str(Path(__file__).absolute().parents[3])
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join(part for part in (root, env.get("PYTHONPATH")) if part)
    python = config.get("python") or sys.executable
    os.execve(python, [python, "-m", "mindspeed_dryrun.commands.activated", launcher, *arguments], env)


def next_on_path(launcher: str, arguments: list) -> int:  # type: ignore[type-arg]
    """The launcher that would have run without us: behind our place on PATH, so that two of us never call each other."""
    here = Path(__file__).absolute().parent
    folders = os.environ.get("PATH", "").split(os.pathsep)
    for folder in folders[folders.index(str(here)) + 1 :] if str(here) in folders else folders:
        path = Path(folder, launcher).absolute()
        if path.parent != here and os.access(path, os.X_OK):
            os.execv(path, [str(path), *arguments])
    print(f"{launcher}: not found (mindspeed-dryrun is not activated, and the real one is not on PATH)", file=sys.stderr)
    return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
