"""The package asks for Python 3.12 for `typing.override` alone, a mark for readers.

The build of torch for CPUs that this project uses is for Python 3.11, so that the tests
run there.
"""

import typing

import typing_extensions

if not hasattr(typing, "override"):
    typing.override = typing_extensions.override
