"""Workers of benchmarks/processes.py that misbehave. A spawned process imports this file by its name."""

import os
import time


class Misbehaving:
    def __init__(self, provider: str, tiny: bool):
        self.provider = provider

    def answer(self) -> str:
        return self.provider

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def die(self, code: int) -> None:
        os._exit(code)
