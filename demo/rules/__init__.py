"""`make demo-rules`: rules and live commands steer trainings that go wrong, and one that goes well."""
