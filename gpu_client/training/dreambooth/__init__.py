"""Parts of the Dreambooth LoRA training `gpu_client.training.dreambooth_lora`."""

import logging

# The hub's library prints its lines itself, and propagation to the root logger would print each line twice.
logging.getLogger("huggingface_hub").propagate = False
# The first import of transformers logs two lines about unused image processors, therefore the filter comes first.
logging.getLogger("transformers.utils.import_utils").addFilter(
    lambda record: "requires torchvision" not in record.getMessage()
)
