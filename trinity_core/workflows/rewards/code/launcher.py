"""Starts one program in a sandbox. Run as a script: `python launcher.py SETTINGS`, JSON from `sandbox.py`.

In `namespaces`, the program sees no network, no other process, and no files except the system's and Python's, which are
read-only, and a small disk in memory; as the first process of its namespace it takes all its child processes with it
when it ends.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NEW_MOUNTS, NEW_NAMES, NEW_IPC, NEW_USERS, NEW_PIDS, NEW_NET = (
    0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
READ_ONLY, NO_SUID, NO_DEVICES, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
KEPT = {2: 2, 4: 4, 8: 8, 1024: 1024, 2048: 2048, 4096: 1 << 21}
"""Flag of a file system (`os.statvfs`) -> flag of `mount`: flags that a new mount must keep."""
DETACH = 2
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 22, 24, 36, 38
FILTERED = 2
"""`PR_SET_SECCOMP` mode in which a filter decides on system calls."""
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Machine -> its number in filters (`AUDIT_ARCH`)."""
UNCOUNTED = {"x86_64": (29, 68, 319, 447), "aarch64": (194, 186, 279, 447)}
"""System calls `shmget`, `msgget`, `memfd_create` and `memfd_secret`: their memory is nobody's resident memory, so no
limit counts it."""
REACHING = {
    "x86_64": (62, 200, 234, 129, 297, 424, 101, 310, 311, 438),
    "aarch64": (129, 130, 131, 138, 240, 424, 117, 270, 271, 438),
}
"""System calls `kill`, `tkill`, `tgkill`, `rt_sigqueueinfo`, `rt_tgsigqueueinfo`, `pidfd_send_signal`, `ptrace`,
`process_vm_readv`, `process_vm_writev` and `pidfd_getfd`, by which a program could reach other processes of its user,
such as its judge."""
SPARE_THREADS = 1024
"""Threads that other processes of the same user may start while a program runs."""
DEVICES = ("null", "zero", "random", "urandom")
WORK = "sandbox"

LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Enter the sandbox, run the program, exit with its status. On failure, write the reason to the descriptor
    `report`."""
    settings = json.loads(sys.argv[1])
    os.set_inheritable(settings["report"], False)
    try:
        _run(settings)
    except OSError as error:
        os.write(settings["report"], str(error).encode())
        os._exit(1)


def _run(settings: dict[str, Any]) -> None:
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    uid, gid = os.geteuid(), os.getegid()
    alone = settings["isolation"] == "namespaces"
    if alone:
        _check(
            LIBC.unshare(NEW_MOUNTS | NEW_NAMES | NEW_IPC | NEW_PIDS | NEW_NET | (NEW_USERS if uid else 0)), "unshare"
        )
        if uid:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
            Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    child = os.fork()
    if child:
        for descriptor in (0, 1, 2, *settings["inherited"]):
            os.close(descriptor)
        _, status = os.waitpid(child, 0)
        _end_rest()
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    folder = _new_root(settings) if alone else settings["files"]
    os.chdir(folder)
    if not uid:
        _become(settings["uid"], folder)
    _limit(settings, shares_user=not alone and uid > 0)
    os.execve(settings["command"][0], settings["command"], settings["environment"])  # noqa: S606 - no shell


def _end_rest() -> None:
    """Kill the processes left by a program without namespaces: its orphans have become children of this process."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while children.exists():
        for left in children.read_text().split():
            os.kill(int(left), signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _new_root(settings: dict[str, Any]) -> str:
    """Make the sandbox's own file system, with the files in the folder that is returned."""
    root, files = settings["root"], {path.name: path.read_bytes() for path in Path(settings["files"]).iterdir()}
    _mount("none", "/", None, RECURSIVE | PRIVATE)
    _mount("tmpfs", root, "tmpfs", NO_SUID | NO_DEVICES, f"size={settings['disk_bytes']},nr_inodes=4096,mode=755")
    for source in map(Path, settings["visible"]):
        _show(source, Path(root + str(source)))
    for device in DEVICES:
        target = Path(root, "dev", device)
        target.parent.mkdir(exist_ok=True)
        target.touch()
        _mount(f"/dev/{device}", str(target), None, BIND)
    Path(root, "proc").mkdir()
    LIBC.mount(b"proc", f"{root}/proc".encode(), b"proc", NO_SUID | NO_DEVICES, None)  # refused in some containers
    for name in ("tmp", WORK):
        Path(root, name).mkdir(exist_ok=True)
        Path(root, name).chmod(0o1777)
    for name, content in files.items():
        Path(root, WORK, name).write_bytes(content)
    os.chdir(root)
    _check(LIBC.pivot_root(b".", b"."), "pivot_root")
    _check(LIBC.umount2(b".", DETACH), "umount")
    return f"/{WORK}"


def _show(source: Path, target: Path) -> None:
    """Bind a folder or file, read-only."""
    if target.exists() or target.is_symlink() or not source.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_symlink():
        target.symlink_to(source.resolve())
        return
    target.mkdir() if source.is_dir() else target.touch()
    _mount(str(source), str(target), None, BIND | RECURSIVE)
    held = os.statvfs(target).f_flag
    kept = sum(flag for bit, flag in KEPT.items() if held & bit)
    _mount("none", str(target), None, BIND | REMOUNT | READ_ONLY | NO_SUID | NO_DEVICES | kept)


def _become(uid: int, folder: str) -> None:
    """Run root's sandbox as a user that owns nothing else, so that process limits apply."""
    for path in (Path(folder), *Path(folder).iterdir()):
        os.chown(path, uid, uid)
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)


def _limit(settings: dict[str, Any], shares_user: bool) -> None:
    for number in range(64):
        LIBC.prctl(PR_CAPBSET_DROP, number, 0, 0, 0)
    _check(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    _refuse((UNCOUNTED, REACHING) if shares_user else (UNCOUNTED,))
    for name, value in settings["limits"].items():
        kind = getattr(resource, name)
        if shares_user and kind == resource.RLIMIT_NPROC:  # the system counts threads of the whole user
            value += _threads_of(os.getuid()) + SPARE_THREADS
        most = resource.getrlimit(kind)[1]
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(kind, (value, value))


def _threads_of(uid: int) -> int:
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            count += len([*Path(process, "task").iterdir()]) if process.stat().st_uid == uid else 0
        except OSError:  # it has ended
            continue
    return count


class _Filter(ctypes.Structure):
    """`struct sock_fprog`: a program of the kernel's packet filter."""

    _fields_ = (("length", ctypes.c_ushort), ("program", ctypes.c_char_p))


def _refuse(tables: Sequence[Mapping[str, Sequence[int]]]) -> None:
    """Make the system calls in these tables, and those of other machines' conventions, fail with EPERM (Linux
    seccomp)."""
    if os.uname().machine not in MACHINES:
        return
    machine = MACHINES[os.uname().machine]
    calls = [call for table in tables for call in table[os.uname().machine]]
    load, equal, at_least, end = 0x20, 0x15, 0x35, 0x06
    steps = [
        (load, 0, 0, 4),
        (equal, 0, len(calls) + 3, machine),
        (load, 0, 0, 0),
        (at_least, len(calls) + 1, 0, 1 << 30),
    ]
    steps += [(equal, len(calls) - place, 0, call) for place, call in enumerate(calls)]
    steps += [(end, 0, 0, 0x7FFF0000), (end, 0, 0, 0x00050000 | errno.EPERM)]
    program = b"".join(struct.pack("=HBBI", *step) for step in steps)
    known = _Filter(len(steps), program)
    _check(LIBC.prctl(PR_SET_SECCOMP, FILTERED, ctypes.byref(known), 0, 0), "seccomp")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    named = kind.encode() if kind else None
    _check(LIBC.mount(source.encode(), target.encode(), named, flags, data.encode()), f"mount {target}")


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
