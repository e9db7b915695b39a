"""What is left of a Ray whose first process has ended."""

import os

import psutil


def end_session(leader: int) -> None:
    """Ray's processes are all in the session of who started it; its agents outlive a killed Ray by a minute."""
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader:
                process.kill()
        except (ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            continue
