"""Python processes that have imported replaykit already, for programs that tests run.

A new interpreter needs seconds of processor time to import torch. So one server process of each
test process imports it, and is forked for each program. ``subprocess`` starts a launcher, which
needs hundredths of a second: it gives the server its arguments, files, folder and environment,
passes signals on, and ends as the program ends.

Only for programs to which it does not matter what is imported at their start. They have another
process number than the launcher, and share its session.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
import warnings

__all__ = ["python"]

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_started: list[str] = []


def python() -> list[str]:
    """Return the begin of a command that takes ``-W`` and ``-c`` as python does."""
    if not hasattr(os, "pidfd_open"):
        return [sys.executable]
    if not _started:
        # Not in a folder of pytest: names of sockets must be short.
        folder = tempfile.mkdtemp(prefix="rk-python-")
        address = f"{folder}/socket"
        command = [sys.executable, __file__, "--serve", address]
        pipe = subprocess.PIPE
        server = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, cwd="/", env=os.environ | {"OMP_NUM_THREADS": "1"}
        )
        atexit.register(_stop, server, folder, os.getpid())
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        _started.extend([sys.executable, "-S", "-E", __file__, address])
    return list(_started)


def _stop(server: subprocess.Popen[bytes], folder: str, owner: int) -> None:
    if os.getpid() != owner:
        return
    server.communicate()
    for name in os.listdir(folder):
        os.unlink(f"{folder}/{name}")
    os.rmdir(folder)


# -- the launcher ---------------------------------------------------------------------------------


def _launch(address: str, arguments: list[str]) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        for number in _FORWARDED:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda number, _: connection.send(bytes([number])))
        request = json.dumps([arguments, os.getcwd(), dict(os.environ)]).encode()
        files = [descriptor for descriptor in range(3) if _is_open(descriptor)]
        socket.send_fds(connection, [len(request).to_bytes(8, "big") + bytes(files)], files)
        connection.sendall(request)
        answer = connection.recv(8)
    status = int.from_bytes(answer, "big", signed=True)
    if status < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no other handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


# -- the server -----------------------------------------------------------------------------------


def _serve(address: str) -> list[str]:
    """Fork for each launcher; return in each program, with its arguments."""
    import tensordict  # noqa: F401

    import replaykit
    import replaykit.datasets

    for name in replaykit.__all__:
        getattr(replaykit, name)
    gc.collect()
    gc.freeze()  # or each program visits all of it at its end
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen(64)
        print("ready", flush=True)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while True:
            ready, _, _ = select.select([listening, 0], [], [])
            if 0 in ready:  # its owner has ended
                os._exit(0)
            connection, _ = listening.accept()
            if _fork() == 0:
                break
            connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size_and_files, descriptors, _, _ = socket.recv_fds(connection, 11, 3)
    request = b""
    while len(request) < int.from_bytes(size_and_files[:8], "big"):
        request += connection.recv(1 << 16)
    arguments, folder, environment = json.loads(request)
    process = _fork()
    if process:
        _keep(connection, process, descriptors)
    connection.close()
    for descriptor in range(3):
        with contextlib.suppress(OSError):
            os.close(descriptor)
    for number, descriptor in zip(size_and_files[8:], descriptors, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    return arguments


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # libraries have threads
        return os.fork()


def _keep(connection: socket.socket, process: int, descriptors: list[int]) -> None:
    """Pass signals to a program, end it with its launcher, and tell how it ended."""
    for descriptor in descriptors:
        os.close(descriptor)
    ended = os.pidfd_open(process)
    while True:
        ready, _, _ = select.select([connection, ended], [], [])
        if ended in ready:
            status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            with contextlib.suppress(OSError):
                connection.send(status.to_bytes(8, "big", signed=True))
            os._exit(0)
        signals = connection.recv(1)
        os.kill(process, signals[0] if signals else signal.SIGKILL)


def _run(arguments: list[str]) -> None:
    """Run a program as the main module of this process, which is forked for it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    while arguments[0] == "-W":
        warnings.simplefilter(arguments[1])  # type: ignore[arg-type]
        del arguments[:2]
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = ["", *filter(None, paths)]
    option, program, *others = arguments
    assert option == "-c", f"expected -W or -c, got {option}"
    sys.argv = ["-c", *others]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(program, "<string>", "exec"), vars(main))


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        _run(_serve(sys.argv[2]))
    else:
        _launch(sys.argv[1], sys.argv[2:])
