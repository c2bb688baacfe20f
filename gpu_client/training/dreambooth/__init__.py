"""Dreambooth with LoRA: what `gpu_client.training.dreambooth_lora` is made of."""

import logging

# The hub's library prints its lines itself; by the root logger each would stand in the log twice.
logging.getLogger("huggingface_hub").propagate = False
# Before anything imports transformers: every start would begin with two lines about
# image processors that nothing here uses.
logging.getLogger("transformers.utils.import_utils").addFilter(
    lambda record: "requires torchvision" not in record.getMessage()
)
