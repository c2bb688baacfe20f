"""Parts of the Dreambooth LoRA training `gpu_client.training.dreambooth_lora`."""

import logging

# The hub's library prints its own lines; propagation to the root logger would print each line twice.
logging.getLogger("huggingface_hub").propagate = False
# The filter precedes the first import of transformers, which otherwise logs two lines about unused image processors.
logging.getLogger("transformers.utils.import_utils").addFilter(
    lambda record: "requires torchvision" not in record.getMessage()
)
