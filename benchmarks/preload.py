"""What the processes of `benchmarks.students` need; a fork server imports it once for all of them."""

import liger_trainer.recipes.distill
import liger_trainer.tools.evaluate
import liger_trainer.tools.generate.run
import liger_trainer.tools.students.make

__all__ = ["liger_trainer"]
