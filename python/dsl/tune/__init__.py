"""Autotuning: finds the config with which a training script runs best, by trying many configs."""
