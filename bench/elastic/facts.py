"""List the properties that tests prove and no section measures, for the report."""

from __future__ import annotations

FACTS = {
    "Engine and codecs are Python on torch, numpy, cryptography, pydantic: pip installs all, without a compiler.": [
        "tests/unit/test_architecture.py::test_rooms_that_take_little_from_outside",
    ],
    "A node has one GPU or none; the tests train on machines without a GPU.": [
        "tests/e2e/test_e2e_elastic.py::test_machines_die_one_by_one_and_all_at_once_and_the_training_goes_on",
        "tests/unit/elastic/test_session_elastic.py::test_a_world_of_one_node_is_plain_diloco_bit_for_bit",
    ],
    "Both ends of a connection prove their certificates; plain text stays on the machine.": [
        "tests/unit/elastic/engines/test_wire_listener.py::test_an_untrusted_caller_is_refused",
        "tests/unit/elastic/engines/test_wire_listener.py::test_a_node_with_another_certificate_is_not_the_peer",
        "tests/unit/elastic/engines/test_wire_listener.py::test_plain_text_stays_on_the_machine",
    ],
    "Frames of another epoch end their connection.": [
        "tests/conformance/engines/test_wire.py::test_an_earlier_epoch_is_refused_as_stale",
        "tests/conformance/engines/test_wire_rogues.py::test_a_wrong_frame_names_its_sender",
    ],
    "Parsers of frames, statuses and requests refuse any other bytes, and nothing is unpickled.": [
        "tests/unit/elastic/engines/test_wire_frames.py::test_garbage_is_no_header",
        "tests/unit/elastic/engines/test_wire_frames.py::test_each_changed_bit_is_noticed",
        "tests/unit/elastic/engines/test_wire_frames.py::test_an_announced_gigabyte_takes_no_memory",
        "tests/unit/test_architecture.py::test_rooms_that_never_touch",
    ],
}
"""Tests by property."""
