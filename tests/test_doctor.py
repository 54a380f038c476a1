import json

import pytest
from vlftlib import devices, doctor
from vlftlib.__main__ import main
from vlftlib.ascend.installed import (
    in_ranges,
    judge_pair,
    normal_version,
    parse_npu_smi,
    read_cann_version,
    version_table,
)
from vlftlib.doctor import diagnose

DRIVER = """\
Version=24.1.0
ascendhal_version=7.35.23
aicpu_version=1.0
Innerversion=V100R001C19SPC002B226
compatible_version=[V100R001C13],[V100R001C15]
compatible_version_fw=[7.0.0,7.6.99]
package_version=24.1.0
"""
FIRMWARE = """\
Version=7.6.0.1.231
firmware_version=1.0
package_version=24.1.0
compatible_version_drv=[23.0.0,23.0.0.],[24.0,24.0.]
"""
CANN = {  # generation: its files in the installation's folder
    "9.1.0": {"aarch64-linux/ascend_toolkit_install.info": "package_name=Ascend-cann-toolkit\nversion=9.1.0\narch=aarch64\n"},
    "8.5.0": {"runtime/version.info": "Version=8.5.0.2.220\nversion_dir=8.5.0\n"},
    "8.3.RC2": {
        "x86_64-linux/ascend_toolkit_install.info": "package_name=Ascend-cann-toolkit\nversion=8.3.RC2\ninnerversion=V100R001\n"
    },
    "8.0.0": {"version.cfg": "# version: 1.0\nruntime_running_version=[7.6.0.1.220:8.0.0]\n"},
    "6.3.RC2": {"x86_64-linux/ascend_toolkit_install.info": "version=6.3.RC2\n", "opp/version.info": "Version=1.84.15.1\n"},
}
SMI_A2 = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.0                   Version: 24.1.0                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 1     910B2               | OK            | 99.0        36                0    / 0             |
| 0                         | 0000:C2:00.0  | 0           0    / 0          3454 / 65536         |
+===========================+===============+====================================================+
| No running processes found in NPU 1                                                            |
"""
SMI_A3 = """\
| npu-smi 25.2.0                   Version: 25.2.0                                               |
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
| 0     Ascend910           | OK            | 178.4       35                0    / 0             |
| 0     0                   | 0000:9D:00.0  | 0           0    / 0          2872 / 65536         |
| 0     Ascend910           | Warning       | -           34                0    / 0             |
| 1     1                   | 0000:9F:00.0  | 0           0    / 0          2868 / 65536         |
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
| 0       0                 | 1234          | python                   | 2900                    |
"""


@pytest.fixture
def server(tmp_path):
    """An Ascend server's file system: `server(cann="8.5.0")` gives its root."""

    def build(cann="8.5.0", driver=DRIVER, firmware=FIRMWARE, chips=1):
        home = "usr/local/Ascend/cann" if cann and cann[0] == "9" else "usr/local/Ascend/ascend-toolkit/latest"
        files = {"etc/ascend_install.info": "UserName=HwHiAiUser\nDriver_Install_Path_Param=/usr/local/Ascend\n"}
        files |= {"usr/local/Ascend/driver/version.info": driver, "usr/local/Ascend/firmware/version.info": firmware}
        files |= {f"{home}/{name}": text for name, text in CANN[cann].items()} if cann else {}
        files |= {f"dev/{name}": "" for name in ("davinci_manager", "devmm_svm", "hisi_hdc")}
        files |= {f"dev/davinci{i}": "" for i in range(chips)}
        for name, text in files.items():
            if text is not None:
                (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / name).write_text(text)
        return tmp_path, {"ASCEND_HOME_PATH": f"/{home}"} if cann else {}

    return build


def probe_of(device, **more):
    described = {"device": device, "device_name": "Ascend910B2" if device == "npu" else "cpu", "cuda": None}
    return lambda name: {"environment": described, "compute": {"relative_error": 1e-7, "seconds": 0.1}} | more


def run(root, environ, device="npu", smi=SMI_A2, **more):
    return diagnose(None, root, environ, lambda *command: smi if command[0] == "npu-smi" else None, probe_of(device, **more))


def found(diagnosis, name):
    return next(finding for finding in diagnosis.findings if finding.name == name)


def installed(monkeypatch, **versions):
    real = devices.version_of
    monkeypatch.setattr(devices, "version_of", lambda package: versions[package] if package in versions else real(package))


def test_nothing_of_ascend(tmp_path):
    diagnosis = run(tmp_path, {}, device="cpu")
    assert found(diagnosis, "Ascend").value == "nothing of it here" and diagnosis.faults == ()
    assert str(diagnosis).endswith("no faults")
    assert json.loads(diagnosis.to_json())["faults"] == []


@pytest.mark.parametrize(
    "cann, torch, torch_npu, value",
    [
        ("9.1.0", "2.12.0", "2.12.0", "official pair"),
        ("8.5.0", "2.9.0+cpu", "2.9.0", "official pair"),
        ("8.3.RC2", "2.9.0", "2.9.0", "mismatch"),
        ("8.0.0", "2.4.0", "2.4.0.post2", "official pair"),
    ],
)
def test_generations(server, monkeypatch, cann, torch, torch_npu, value):
    installed(monkeypatch, torch=torch, torch_npu=torch_npu)
    diagnosis = run(*server(cann))
    assert found(diagnosis, "CANN").value.startswith(cann) and found(diagnosis, "driver").value == "24.1.0"
    assert diagnosis.faults == ()
    assert found(diagnosis, "version row").value == value
    order = [finding.name for finding in diagnosis.findings]
    assert order.index("driver") < order.index("firmware") < order.index("CANN") < order.index("torch_npu")


def test_normal_version():
    assert normal_version("V8.3.rc1") == "8.3.RC1" == normal_version("8.3.RC1.alpha003")


@pytest.mark.parametrize("cann", CANN)
def test_read_cann_version(server, cann):
    root, environ = server(cann)
    assert read_cann_version(root / environ["ASCEND_HOME_PATH"][1:]) == cann


def test_no_cann_and_a_broken_torch_npu(server, monkeypatch):
    installed(monkeypatch, torch="2.9.0", torch_npu="2.9.0")
    fault = "import torch_npu fails: ImportError: libhccl.so: cannot open shared object file"
    diagnosis = run(*server(cann=None), device="cpu", npu_fault=fault)
    assert [finding.name for finding in diagnosis.faults] == ["CANN", "torch_npu"]
    assert "libhccl.so" in found(diagnosis, "torch_npu").advice
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in found(diagnosis, "torch_npu").advice
    assert "mend them in this order: CANN, torch_npu" in str(diagnosis)


def test_cann_without_its_environment(server, monkeypatch):
    installed(monkeypatch, torch="2.9.0", torch_npu="2.9.0")
    root, _ = server()
    advice = found(run(root, {}, device="cpu", npu_fault="x"), "CANN").advice
    assert "source" in advice and "set_env.sh" in advice
    assert "is missing" in found(run(root, {"ASCEND_HOME_PATH": "/nope"}, device="cpu", npu_fault="x"), "CANN").value


def test_firmware_outside_the_drivers_range(server, monkeypatch):
    installed(monkeypatch, torch="2.9.0", torch_npu="2.9.0")
    root, environ = server(firmware="Version=7.7.0.1.231\npackage_version=25.0.rc1.1\n")
    diagnosis = run(root, environ, device="cpu", npu_fault="x")
    assert found(diagnosis, "firmware").verdict == "fault" and "[7.0.0,7.6.99]" in found(diagnosis, "firmware").advice
    assert in_ranges("7.6.0.1.231", "[7.0.0,7.6.99]") and not in_ranges("7.7.0", "[7.0.0,7.6.99],[8.0.0,8.1.9]")


def test_no_torch_npu_on_an_ascend_server(server, monkeypatch):
    installed(monkeypatch, torch="2.9.0", torch_npu=None)
    finding = found(run(*server(), device="cpu"), "torch_npu")
    assert finding.verdict == "fault" and "torch==2.9.0 (CPU build) torch-npu==2.9.0" in finding.advice


@pytest.mark.parametrize(
    "torch, torch_npu, cann, verdict, words",
    [
        ("2.12.0+cpu", "2.12.0", "9.1.0", "ok", "official pair"),
        ("1.11.0", "1.11.0", "6.3.RC1", "ok", "official pair"),
        # A report gives this one as a pair; the vendor's table doesn't.
        ("1.11.0", "1.11.0", "6.3.RC2", "warning", "install torch==1.11.0 (CPU build) torch-npu==1.11.0.post1"),
        ("2.13.0", "2.13.0", "9.1.0", "warning", "unlisted"),
        ("2.9.0", "2.9.0", None, "warning", "the row's CANN is 8.5.0"),
        ("2.9.0", "2.8.0", "8.5.0", "fault", "install torch==2.9.0 (CPU build) torch-npu==2.9.0"),
        ("2.14.1", "2.14.0", "9.1.0", "fault", "install torch==2.12.0 (CPU build) torch-npu==2.12.0"),
    ],
)
def test_judge_pair(torch, torch_npu, cann, verdict, words):
    assert judge_pair(torch, torch_npu, cann)[0] == verdict
    assert words in judge_pair(torch, torch_npu, cann)[1]


def test_all_rows_are_official_pairs():
    rows = version_table()["rows"]
    assert len(rows) == 62
    assert {judge_pair(row["torch"], row["torch_npu"], row["cann"])[0] for row in rows} == {"ok"}


def test_npu_smi_tables(server, monkeypatch):
    assert parse_npu_smi(SMI_A2) == [
        {"npu": 1, "chip": 0, "name": "910B2", "health": "OK", "memory_used_mb": 3454, "memory_total_mb": 65536}
    ]
    assert [(chip["npu"], chip["chip"], chip["health"]) for chip in parse_npu_smi(SMI_A3)] == [(0, 0, "OK"), (0, 1, "Warning")]
    installed(monkeypatch, torch="2.9.0", torch_npu="2.9.0")
    assert "NPU 0 chip 1: Warning" in found(run(*server(), smi=SMI_A3, device="cpu"), "npu-smi").advice
    assert found(run(*server(), smi="DrvMngGetConsoleLogLevel failed\n", device="cpu"), "npu-smi").verdict == "fault"


@pytest.mark.parametrize(
    "variables, name, verdict",
    [
        ({"ASCEND_RT_VISIBLE_DEVICES": "0"}, "ASCEND_RT_VISIBLE_DEVICES", "ok"),
        ({"ASCEND_RT_VISIBLE_DEVICES": "1,0"}, "ASCEND_RT_VISIBLE_DEVICES", "fault"),
        ({"ASCEND_RT_VISIBLE_DEVICES": "0, 1"}, "ASCEND_RT_VISIBLE_DEVICES", "fault"),
        ({"ASCEND_RT_VISIBLE_DEVICES": "3"}, "ASCEND_RT_VISIBLE_DEVICES", "fault"),
        ({"PYTORCH_ALLOC_CONF": "a", "PYTORCH_NPU_ALLOC_CONF": "b"}, "PYTORCH_NPU_ALLOC_CONF", "fault"),
        ({"INF_NAN_MODE_ENABLE": "0"}, "INF_NAN_MODE_ENABLE", "fault"),
        ({"HCCL_OP_TIMEOUT": "600"}, "HCCL_OP_TIMEOUT", "warning"),
        ({"ASCEND_LAUNCH_BLOCKING": "1"}, "ASCEND_LAUNCH_BLOCKING", "warning"),
    ],
)
def test_environment_variables(server, monkeypatch, variables, name, verdict):
    installed(monkeypatch, torch="2.9.0", torch_npu="2.9.0")
    root, environ = server()
    assert found(run(root, environ | variables), name).verdict == verdict


def test_missing_device_files(server, monkeypatch):
    installed(monkeypatch, torch="2.9.0", torch_npu="2.9.0")
    root, environ = server(chips=0)
    (root / "dev/hisi_hdc").unlink()
    advice = found(run(root, environ, device="cpu", npu_fault="x"), "/dev").advice
    assert "/dev/davinci0, /dev/hisi_hdc" in advice


def test_what_computes_is_no_fault(server, monkeypatch):
    # In a container the driver's folder is often not mounted though everything works.
    installed(monkeypatch, torch="2.9.0", torch_npu="2.9.0")
    diagnosis = run(*server(driver=None, firmware=None))
    assert found(diagnosis, "driver").verdict == "warning" and diagnosis.faults == ()


def test_wrong_arithmetic_is_a_fault(tmp_path):
    for error in (0.2, float("nan")):
        diagnosis = run(tmp_path, {}, device="cpu", compute={"relative_error": error, "seconds": 0.1})
        assert [finding.name for finding in diagnosis.faults] == ["compute"]


@pytest.mark.parametrize("verdict, status", [("ok", 0), ("warning", 0), ("fault", 1)])
def test_the_command_exits_1_on_a_fault(verdict, status, monkeypatch, capsys):
    finding = doctor.Finding("CANN", "not found", verdict, "install it")
    monkeypatch.setattr(doctor, "diagnose", lambda: doctor.Diagnosis((finding,)))
    assert main(["doctor", "--json"]) == status == len(json.loads(capsys.readouterr().out)["faults"])
    assert main(["doctor"]) == status and "not found" in capsys.readouterr().out


def test_the_real_probe():
    assert doctor.run_probe("cpu")["compute"]["relative_error"] < 1e-5
    assert "must be npu, cuda or cpu" in doctor.run_probe("gpu")["fault"]


def test_a_probe_that_dies_or_hangs(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import os; os.write(2, b'terminate called: c10::ValueError'); os.abort()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "terminate called: c10::ValueError" in doctor.run_probe("cpu")["fault"]
    (tmp_path / "sitecustomize.py").write_text("import time; time.sleep(60)\n")
    monkeypatch.setattr(doctor, "PROBE_TIMEOUT_S", 1)
    assert doctor.run_probe("cpu")["fault"] == "the device gave no answer in 1 s"
