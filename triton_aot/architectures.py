"""The architectures that kernels are compiled for, and what each one's multiprocessor holds."""

# Shared memory one block may use, bytes (CUDA C++ Programming Guide, technical specifications).
KIB = 1024
MAX_SHARED = {
    "sm_80": 163 * KIB,
    "sm_86": 99 * KIB,
    "sm_89": 99 * KIB,
    "sm_90": 227 * KIB,
    "sm_100": 227 * KIB,
    "sm_103": 227 * KIB,
    "sm_120": 99 * KIB,
    "sm_121": 99 * KIB,
}


def capability(arch: str) -> int:
    """sm_90 -> 90"""
    return int(arch.removeprefix("sm_"))
