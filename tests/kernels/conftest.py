from kernel_fixtures import *  # noqa: F403 (fixtures of all tests of kernels, and which cases are slow)
