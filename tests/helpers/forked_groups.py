"""The processes of a benchmark as forks: each would be an interpreter that starts another one, which imports torch."""

import select
import signal
import subprocess

from launching import fork_server

from paramserver.tools.bench.processes import ProcessGroup


class ForkedGroup(ProcessGroup):
    """In place of a ``ProcessGroup`` of commands that begin with ``python -m`` and a module of this package."""

    def __enter__(self):
        for command, output in zip(self._commands, self._outputs, strict=True):
            package, _, program = command[2].partition(".")
            assert (command[1], package) == ("-m", "paramserver")
            run = fork_server().start(command[3:], output.parent, self._environ, program, output=output)
            self._processes.append(ForkedCommand(run))
        return self


class ForkedCommand:
    """What a ``ProcessGroup`` uses of ``subprocess.Popen``."""

    def __init__(self, run):
        self.pid, self.returncode, self._run = run.pid, None, run

    def poll(self):
        if self.returncode is None and select.select([self._run._reading], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout_s=30):
        if self.returncode is None:
            if not select.select([self._run._reading], [], [], timeout_s)[0]:
                raise subprocess.TimeoutExpired("a process of a benchmark", timeout_s)
            code = self._run.wait()
            self.returncode = -signal.SIGKILL if code is None else code
            self._run.join()
            self._run.__exit__()
        return self.returncode
