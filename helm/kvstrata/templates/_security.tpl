{{/* TLS, tokens and tickets: the files, and the flags that name them. */}}

{{/* The Secret with ca.crt, tls.crt and tls.key; empty without TLS. */}}
{{- define "kvstrata.tlsSecret" -}}
{{- if .Values.tls.certManager.enabled -}}
{{- include "kvstrata.fullname" . }}-tls
{{- else -}}
{{- .Values.tls.secretName -}}
{{- end -}}
{{- end -}}

{{/* "yes" where calls have to show a token. */}}
{{- define "kvstrata.asks" -}}
{{- if .Values.security.tokensSecret.name -}}yes{{- end -}}
{{- end -}}

{{/* Flags of both daemons. */}}
{{- define "kvstrata.securityArgs" -}}
{{- if include "kvstrata.asks" . }}
- --tokens=/etc/kvstrata/security/tokens.yaml
- --ticket-keys=/etc/kvstrata/security/ticket-keys
{{- end }}
{{- if include "kvstrata.tlsSecret" . }}
- --tls-cert=/etc/kvstrata/tls/tls.crt
- --tls-key=/etc/kvstrata/tls/tls.key
- --tls-ca=/etc/kvstrata/tls/ca.crt
{{- end }}
{{- if .Values.tls.clientCerts }}
- --client-certs
{{- end }}
{{- end -}}

{{/* For `kvstrata health` and the like within a pod: the token that may look. */}}
{{- define "kvstrata.securityEnv" -}}
{{- if .Values.security.readTokenSecret.name }}
- name: KVSTRATA_TOKEN_FILE
  value: /etc/kvstrata/read/token
{{- end }}
{{- if include "kvstrata.tlsSecret" . }}
- name: KVSTRATA_CA
  value: /etc/kvstrata/tls/ca.crt
{{- end }}
{{- if .Values.tls.clientCerts }}
- name: KVSTRATA_CERT
  value: /etc/kvstrata/tls/tls.crt
- name: KVSTRATA_KEY
  value: /etc/kvstrata/tls/tls.key
{{- end }}
{{- end -}}

{{/* Of those that call only; daemons mount `security` as well. */}}
{{- define "kvstrata.callerMounts" -}}
{{- if include "kvstrata.tlsSecret" . }}
- name: tls
  mountPath: /etc/kvstrata/tls
  readOnly: true
{{- end }}
{{- if .Values.security.readTokenSecret.name }}
- name: read-token
  mountPath: /etc/kvstrata/read
  readOnly: true
{{- end }}
{{- end -}}

{{- define "kvstrata.callerVolumes" -}}
{{- with include "kvstrata.tlsSecret" . }}
- name: tls
  secret:
    secretName: {{ . }}
    defaultMode: 0440
{{- end }}
{{- with .Values.security.readTokenSecret }}
{{- if .name }}
- name: read-token
  secret:
    secretName: {{ .name }}
    defaultMode: 0440
    items:
      - key: {{ .key }}
        path: token
{{- end }}
{{- end }}
{{- end -}}

{{- define "kvstrata.securityMounts" -}}
{{- include "kvstrata.callerMounts" . }}
{{- if include "kvstrata.asks" . }}
- name: security
  mountPath: /etc/kvstrata/security
  readOnly: true
{{- end }}
{{- end -}}

{{/* `node`: with the token that nodes show to masters. */}}
{{- define "kvstrata.securityVolumes" -}}
{{- $root := .root }}
{{- include "kvstrata.callerVolumes" $root }}
{{- if include "kvstrata.asks" $root }}
{{- with $root.Values.security }}
- name: security
  projected:
    defaultMode: 0440
    sources:
      - secret:
          name: {{ .tokensSecret.name }}
          items:
            - key: {{ .tokensSecret.key }}
              path: tokens.yaml
      - secret:
          name: {{ .ticketKeysSecret.name }}
          items:
            - key: {{ .ticketKeysSecret.key }}
              path: ticket-keys
      {{- if $.node }}
      - secret:
          name: {{ .nodeTokenSecret.name }}
          items:
            - key: {{ .nodeTokenSecret.key }}
              path: node-token
      {{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* How the kubelet asks, which has neither a token nor a certificate: `path` where that is served to everybody, else
     whether the port answers. */}}
{{- define "kvstrata.probe" -}}
{{- $values := .root.Values }}
{{- if or $values.tls.clientCerts (and (include "kvstrata.asks" .root) (eq .path "/metrics")) }}
tcpSocket:
  port: http
{{- else }}
httpGet:
  path: {{ .path }}
  port: http
  {{- if include "kvstrata.tlsSecret" .root }}
  scheme: HTTPS
  {{- end }}
{{- end }}
{{- end -}}
