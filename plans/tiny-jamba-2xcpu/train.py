"""Trains tiny-jamba with the plan in this folder.

The deepspeed launcher starts it on every rank; launch.sh holds the line. It takes DeepSpeed's own arguments and

    --steps N          optimizer steps
    --seed S           of the initial weights
    --data FILE.txt    text to train on, byte by byte
    --init FOLDER      Hugging Face safetensors to start from
    --resume FOLDER    checkpoints to go on from, whatever plan saved them
    --save FOLDER      where to save a checkpoint after the last step
    --save-every N     save one every N steps, too
    --losses FILE.json where to write the loss of every step
    --trace FILE       where to write the measured timeline of the last step, for 'pipeplan show' and 'calibrate'
"""

from pathlib import Path

from pipeplan.runtime.training import train

if __name__ == "__main__":
    train(Path(__file__).resolve().parent)
