"""What a process of `benchmarks.students` needs: a fork server imports it once for all of them."""

import liger_trainer.extras.generate.run
import liger_trainer.extras.students.make
import liger_trainer.recipes.distill
import liger_trainer.tools.evaluate

__all__ = ["liger_trainer"]
