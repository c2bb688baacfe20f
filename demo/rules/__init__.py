"""`make demo-rules`: rules stop, roll back and end trainings; live commands steer one."""
