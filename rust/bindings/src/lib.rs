#![doc = "t"]
