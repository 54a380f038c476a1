"""A training script that knows nothing of vlftlib, as someone has it for an Ascend server: rehearsed unchanged by a test."""

import sys

import torch
import torch_npu  # noqa: F401
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        picture = torch.zeros(1, 8, 8)
        picture[:, : 2 + index % 4, : 2 + index % 4] = 1
        return picture, index % 4


def main():
    torch.manual_seed(0)
    device = torch.device("npu:0")
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    model.append(nn.Linear(32, 4))
    model.to(device)
    if "--inverse" in sys.argv:
        model.append(Inverse())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scaler = torch.npu.amp.GradScaler()
    for _ in range(3):
        for pictures, labels in DataLoader(Squares(), batch_size=8, num_workers=2, multiprocessing_context="spawn"):
            with torch.npu.amp.autocast():
                loss = nn.functional.cross_entropy(model(pictures.to(device)), labels.to(device))
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            print(f"loss {loss.item():.4f} on {torch.npu.get_device_name(0)}", flush=True)


class Inverse(nn.Module):
    def forward(self, x):
        return torch.linalg.inv(torch.eye(x.shape[-1], device=x.device) + 0.1 * x.T @ x)


if __name__ == "__main__":
    main()
