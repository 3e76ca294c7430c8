"""The exercise checks: `checks.exercise_1_2a(answer)` is exercise 1.2a, the first one of lesson 1.2.

In a lesson a check prints what is still wrong; with `strict=True`, as in the solutions, it raises AssertionError.
Some exercises start from a recording: `checks.recorded("hung_job_stacks.txt")` returns what it holds.
"""

from checks.chapter_1 import (  # noqa: F401
    exercise_1_1a,
    exercise_1_1b,
    exercise_1_1c,
    exercise_1_2a,
    exercise_1_2b,
    exercise_1_2c,
    exercise_1_3a,
    exercise_1_3b,
    exercise_1_3c,
    exercise_1_4a,
    exercise_1_4b,
    exercise_1_5a,
    exercise_1_5b,
    exercise_1_6a,
)
from checks.chapter_2 import (  # noqa: F401
    exercise_2_1a,
    exercise_2_1b,
    exercise_2_2a,
    exercise_2_2b,
    exercise_2_3a,
    exercise_2_3b,
    exercise_2_4a,
    exercise_2_4b,
    exercise_2_5a,
)
from checks.chapter_3 import (  # noqa: F401
    exercise_3_1a,
    exercise_3_1b,
    exercise_3_1c,
    exercise_3_2a,
    exercise_3_2b,
    exercise_3_2c,
    exercise_3_3a,
    exercise_3_3b,
    exercise_3_4a,
    exercise_3_4b,
    exercise_3_5a,
    exercise_3_5b,
)
from checks.chapter_3_finetuning import (  # noqa: F401
    exercise_3_6a,
    exercise_3_6b,
    exercise_3_7a,
    exercise_3_7b,
    exercise_3_8a,
)
from checks.chapter_4 import (  # noqa: F401
    exercise_4_1a,
    exercise_4_1b,
    exercise_4_2a,
    exercise_4_2b,
    exercise_4_3a,
    exercise_4_3b,
    exercise_4_4a,
    exercise_4_4b,
    exercise_4_5a,
    exercise_4_5b,
    exercise_4_6a,
    exercise_4_6b,
    exercise_4_7a,
    exercise_4_7b,
    exercise_4_8a,
)
from checks.chapter_5 import exercise_5_1a, exercise_5_1b, exercise_5_2a, exercise_5_2b  # noqa: F401
from checks.chapter_6 import (  # noqa: F401
    exercise_6_1a,
    exercise_6_1b,
    exercise_6_2a,
    exercise_6_2b,
    exercise_6_3a,
    exercise_6_3b,
)
from checks.chapter_6_experts import exercise_6_8a, exercise_6_8b  # noqa: F401
from checks.chapter_6_long_sequences import exercise_6_7a, exercise_6_7b  # noqa: F401
from checks.chapter_6_mesh_faults import exercise_6_4a  # noqa: F401
from checks.chapter_6_pipelines import exercise_6_5a, exercise_6_5b  # noqa: F401
from checks.chapter_6_schedules import (  # noqa: F401
    exercise_6_6a,
    exercise_6_6b,
    exercise_6_6c,
    exercise_6_6d,
)
from checks.recordings import recorded  # noqa: F401
