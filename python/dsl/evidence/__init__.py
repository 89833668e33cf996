"""What is known about a failure: from the engine, error files, logs, the kernel. Facts, no words."""
