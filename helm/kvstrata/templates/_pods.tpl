{{/* What pods of both kinds have in common. */}}

{{- define "kvstrata.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Scheduling that is a value: nodeSelector, tolerations, priorityClassName. */}}
{{- define "kvstrata.scheduling" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{/* One pod a host, as far as `spread` says: off, preferred, required. */}}
{{- define "kvstrata.spread" -}}
{{- if eq .spread "required" }}
affinity:
  podAntiAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels:
            {{- .labels | nindent 12 }}
{{- end }}
{{- if ne .spread "off" }}
topologySpreadConstraints:
  {{- if eq .spread "preferred" }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- .labels | nindent 8 }}
  {{- end }}
  - maxSkew: 1
    topologyKey: topology.kubernetes.io/zone
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- .labels | nindent 8 }}
{{- end }}
{{- end -}}

{{/* Whether the process answers at all. Not /healthz: it is 503 for what a restart does not mend. */}}
{{- define "kvstrata.liveness" -}}
livenessProbe:
  {{- include "kvstrata.probe" (dict "root" . "path" "/metrics") | nindent 2 }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 12
readinessProbe:
  {{- include "kvstrata.probe" (dict "root" . "path" "/readyz") | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 3
{{- end -}}

{{- define "kvstrata.cpu" -}}
{{- with .request }}
cpu: {{ . | quote }}
{{- end }}
{{- end -}}
