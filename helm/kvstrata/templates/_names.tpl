{{/* Names, labels, addresses. */}}

{{- define "kvstrata.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "kvstrata.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kvstrata.labels" -}}
{{ include "kvstrata.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: kvstrata
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{/* Of pods: no version, as another label is another pod, and a pod that is replaced loses what is in memory. */}}
{{- define "kvstrata.podLabels" -}}
{{ include "kvstrata.selector" . }}
app.kubernetes.io/part-of: kvstrata
{{- end -}}

{{- define "kvstrata.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "kvstrata.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "kvstrata.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{/* The host of master number .index, by the headless service. */}}
{{- define "kvstrata.masterHost" -}}
{{- $full := include "kvstrata.fullname" .root -}}
{{- printf "%s-master-%d.%s-masters.%s.svc.%s" $full (int .index) $full .root.Release.Namespace .root.Values.clusterDomain -}}
{{- end -}}

{{/* The channel address of every master, comma-separated: for --master and KVSTRATA_MASTER. */}}
{{- define "kvstrata.masters" -}}
{{- $root := . -}}
{{- $all := list -}}
{{- range $index := until (int .Values.master.replicas) -}}
{{- $host := include "kvstrata.masterHost" (dict "root" $root "index" $index) -}}
{{- $all = append $all (printf "%s:%d" $host (int $root.Values.master.ports.channel)) -}}
{{- end -}}
{{- join "," $all -}}
{{- end -}}

{{- define "kvstrata.podIp" -}}
{{- if eq .Values.ipFamily "IPv6" -}}[$(POD_IP)]{{- else -}}$(POD_IP){{- end -}}
{{- end -}}

{{- define "kvstrata.anyIp" -}}
{{- if eq .Values.ipFamily "IPv6" -}}[::]{{- else -}}0.0.0.0{{- end -}}
{{- end -}}

{{- /* The masters' ports by name; those of KV events where they are on. */}}
{{- define "kvstrata.masterPorts" -}}
{{- $ports := .Values.master.ports }}
{{- with .Values.master.kvEvents }}
{{- if .enabled }}
{{- $ports = merge (dict "kv-events" .port "kv-replay" .replayPort) $ports }}
{{- end }}
{{- end }}
{{- toYaml $ports }}
{{- end }}
