"""Runs at the start of every Python process of an activated shell. Waits for MindSpore; the user's own sitecustomize runs too.

Any Python may meet this file: it keeps to old syntax, imports next to nothing, and never raises.
"""

import os
import sys

_HERE = os.path.dirname(os.path.realpath(__file__))
_WAITED_FOR = ("mindspore", "msadapter", "torch_npu")


class _FirstImport:
    """Prepares the process when it turns out to be a training job, and is gone from then on."""

    @staticmethod
    def find_spec(fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        if fullname in _WAITED_FOR:
            sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not _FirstImport]
            root = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))
            sys.path.append(root)
            try:
                from mindspeed_dryrun.rank import worker

                worker.prepare_activated()
            finally:
                sys.path.remove(root)
        return None


def _is_activated():  # type: ignore[no-untyped-def]
    text = os.environ.get("MINDSPEED_DRYRUN", "")
    return '"mode": "activate"' in text


def _run_the_users_own():  # type: ignore[no-untyped-def]
    from importlib.machinery import PathFinder

    others = [folder for folder in sys.path if os.path.realpath(folder or ".") != _HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    from importlib.util import module_from_spec

    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if _is_activated():  # type: ignore[no-untyped-call]
    sys.meta_path.insert(0, _FirstImport)
_run_the_users_own()  # type: ignore[no-untyped-call]
