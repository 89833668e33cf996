"""Our command under the name that is the first argument, in any Python: it runs this folder."""

import sys
from os.path import abspath, dirname

COMMANDS = {
    "torchrun": ("dsl.run", "command"),
    "torch.distributed.run": ("dsl.run", "command"),
    "torch.distributed.launch": ("dsl.launch", "start"),
    "deepspeed": ("dsl.__main__", "main"),
}

if __name__ == "__main__":
    library = sys.path[0] = dirname(dirname(dirname(abspath(__file__))))
    __import__("dsl_launcher")  # our modules come first, whatever the user's are called
    sys.path.remove(library)  # this Python has a torch of its own
    module, function = COMMANDS[sys.argv.pop(1)]
    if code := getattr(__import__(module, fromlist=[function]), function)():
        sys.exit(code)
