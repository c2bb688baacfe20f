"""The Dreambooth training, whose class images come as slowly as a test wants them, and are shown at once.

The first argument is a file that says how many this process may generate by now; the others are the training's.
"""

import sys
import time
from pathlib import Path
from typing import Any

from gpu_client.training import dreambooth_lora
from gpu_client.training.dreambooth.sampling import class_images, shared_images

allowed, arguments = Path(sys.argv[1]), sys.argv[2:]
sample = class_images.sample
made: list[int] = []


def slowly(*given: Any) -> Any:
    """Generate no more than is allowed."""
    made.extend(given[-1])
    while len(made) > int(allowed.read_text()):
        time.sleep(0.05)
    return sample(*given)


class_images.sample = slowly
shared_images.PART_EVERY_S = 0.0
dreambooth_lora.main(arguments)
