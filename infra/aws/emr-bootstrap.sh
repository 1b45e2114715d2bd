#!/bin/bash
# The bootstrap action of infra/aws/emr.yaml, on every node: Java and Python with Penstock's packages, of one version on all of them. The
# primary node also gets the transform as a service, which begins when YARN answers.
set -euo pipefail
bucket=$1 wheel=$2 region=$3 prefix=$4 executors=$5 secret=$6

sudo dnf install --assumeyes --quiet java-17-amazon-corretto-headless python3.11
sudo python3.11 -m venv /opt/penstock
aws s3 cp --quiet "s3://$bucket/$wheel" "/tmp/$wheel"
sudo /opt/penstock/bin/python -m pip install --quiet "/tmp/$wheel"

if ! grep -q '"isMaster": *true' /mnt/var/lib/info/instance.json; then exit 0; fi

sudo mkdir -p /etc/penstock /var/lib/penstock
sudo chown hadoop: /var/lib/penstock
for file in pipes.yaml penstock.yaml; do sudo aws s3 cp --quiet "s3://$bucket/$file" "/etc/penstock/$file"; done
control=
if [ "$secret" != none ]; then
  sudo install -m 600 -o hadoop /dev/null /etc/penstock/transform.token
  aws secretsmanager get-secret-value --region "$region" --secret-id "$secret" --query SecretString --output text |
    sudo tee /etc/penstock/transform.token >/dev/null
  control=PENSTOCK_TRANSFORM_CONTROL_TOKEN_FILE=/etc/penstock/transform.token
fi
sudo tee /etc/systemd/system/penstock.service >/dev/null <<END
[Unit]
After=network-online.target
StartLimitIntervalSec=0
[Service]
User=hadoop
Environment=JAVA_HOME=/usr/lib/jvm/java-17-amazon-corretto HADOOP_CONF_DIR=/etc/hadoop/conf AWS_REGION=$region
Environment=PENSTOCK_BROKER=kinesis://$region?prefix=$prefix PENSTOCK_PIPES=/etc/penstock/pipes.yaml PENSTOCK_CONFIG=/etc/penstock/penstock.yaml
Environment=PENSTOCK_TRANSFORM_MASTER=yarn PENSTOCK_TRANSFORM_EXECUTORS=$executors PENSTOCK_TRANSFORM_EXECUTOR_PYTHON=/opt/penstock/bin/python
Environment=PENSTOCK_TRANSFORM_CHECKPOINTS=s3a://$bucket/checkpoints PENSTOCK_TRANSFORM_MANAGEMENT=0.0.0.0:9100
Environment=PENSTOCK_TRANSFORM_DATA=/var/lib/penstock PENSTOCK_JARS=/var/lib/penstock/jars $control
ExecStart=/opt/penstock/bin/python -m spark
TimeoutStopSec=60
Restart=always
RestartSec=5
[Install]
WantedBy=multi-user.target
END
sudo systemctl enable --now penstock  # until YARN runs, each start fails and is tried again
