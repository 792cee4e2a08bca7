"""Verifies a package: every output of its kernels against the reference.

Modules, each resting on those before it:

- ``subject`` is what is verified: the shape and the promises of a package;
- ``cases`` says which calls are made, and with what command they are repeated;
- ``inputs`` draws the arguments of a call;
- ``compare`` measures what a call published and returned;
- ``report`` shows what came out;
- ``calls`` makes the calls of a case, one after another, wherever the kernels run:
- ``on_cpu`` runs them in the emulator, and under its adversary several at once;
- ``on_cuda`` runs them on GPUs, where one plays all ranks or each plays its own:
  ``together`` is what ranks in several processes have in common, and the ``watchdog``
  ends what does not end.

Each call of a case takes the next kind of input, and the next kernel that publishes:
publish itself, then each finalize.

To verify a package on GPUs needs torch, numpy and what the package itself needs; specs
and the emulator need the other dependencies of mhcgen, too.
"""
