package penstock.kafka

import java.io.{ByteArrayInputStream, IOException}
import java.nio.charset.StandardCharsets.US_ASCII
import java.security.cert.{Certificate, CertificateException, CertificateFactory}
import java.security.spec.{InvalidKeySpecException, PKCS8EncodedKeySpec}
import java.security.{KeyFactory, KeyStore, PrivateKey}
import java.util.{Arrays, Base64, Collections, Map => Settings, Set => Names}
import javax.net.ssl.{KeyManagerFactory, SSLContext, SSLEngine, TrustManagerFactory}
import org.apache.kafka.common.security.auth.SslEngineFactory

/** TLS of Kafka's clients from our files in PEM form. Each new connection has the files as they are now; while they cannot be used,
  * those that were read last.
  *
  * Settings: penstock.tls.ca, .certificate and .key are paths; without `ca` the authorities of this Java are trusted.
  */
class Tls extends SslEngineFactory {
  private var files = new TlsFiles(None, None, None)

  override def configure(settings: Settings[String, _]): Unit = {
    def path(name: String) = Option(settings.get(s"penstock.tls.$name")).map(_.toString)
    files = new TlsFiles(path("ca"), path("certificate"), path("key"))
    files.context(): Unit // what is wrong is said when the client is made
  }

  override def createClientSslEngine(host: String, port: Int, endpointIdentification: String): SSLEngine = {
    val engine = files.context().createSSLEngine(host, port)
    engine.setUseClientMode(true)
    val parameters = engine.getSSLParameters
    parameters.setEndpointIdentificationAlgorithm(endpointIdentification)
    engine.setSSLParameters(parameters)
    engine
  }

  override def createServerSslEngine(host: String, port: Int): SSLEngine = throw new UnsupportedOperationException
  override def shouldBeRebuilt(settings: Settings[String, Object]): Boolean = false
  override def reconfigurableConfigs: Names[String] = Collections.emptySet()
  override def keystore: KeyStore = null
  override def truststore: KeyStore = null
  override def close(): Unit = ()
}

/** An `SSLContext` of these files, made anew when their content has changed. Thread-safe. */
private class TlsFiles(ca: Option[String], certificate: Option[String], key: Option[String]) {
  private var known: Option[(Seq[Array[Byte]], SSLContext)] = None

  def context(): SSLContext = synchronized {
    try {
      val read = Seq(ca, certificate, key.orElse(certificate)).flatten.map(Content.of)
      known match {
        case Some((before, made)) if before.corresponds(read)(Arrays.equals) => made
        case _                                                             =>
          val made = make()
          known = Some(read -> made)
          made
      }
    } catch {
      case error @ (_: IOException | _: java.security.GeneralSecurityException) =>
        known.map(_._2).getOrElse(throw new IOException(s"TLS with Kafka: ${error.getMessage}", error))
    }
  }

  private def make(): SSLContext = {
    val trusted = ca.map { path =>
      val store = empty()
      Pem.certificates(path).zipWithIndex.foreach { case (each, n) => store.setCertificateEntry(s"ca$n", each) }
      store
    }
    val trust = TrustManagerFactory.getInstance(TrustManagerFactory.getDefaultAlgorithm)
    trust.init(trusted.orNull)
    val keys = certificate.map { path =>
      val store = empty()
      store.setKeyEntry("own", Pem.key(key.getOrElse(path)), Array.emptyCharArray, Pem.certificates(path).toArray)
      val factory = KeyManagerFactory.getInstance(KeyManagerFactory.getDefaultAlgorithm)
      factory.init(store, Array.emptyCharArray)
      factory.getKeyManagers
    }
    val context = SSLContext.getInstance("TLS")
    context.init(keys.orNull, trust.getTrustManagers, null)
    context
  }

  private def empty(): KeyStore = {
    val store = KeyStore.getInstance("PKCS12")
    store.load(null, Array.emptyCharArray)
    store
  }
}

private object Pem {
  private val Block = "(?s)-----BEGIN (?:TRUSTED )?(CERTIFICATE|PRIVATE KEY)-----(.+?)-----END".r
  private val Algorithms = Seq("RSA", "EC", "EdDSA")

  /** What follows a certificate in OpenSSL's form `TRUSTED CERTIFICATE` does not count. */
  def certificates(path: String): Seq[Certificate] = {
    val factory = CertificateFactory.getInstance("X.509")
    val found = blocks(path, "CERTIFICATE").map(each => factory.generateCertificate(new ByteArrayInputStream(each)))
    if (found.isEmpty) throw new CertificateException(s"$path has no certificate in PEM form")
    found
  }

  def key(path: String): PrivateKey = {
    val found = blocks(path, "PRIVATE KEY").headOption.map(new PKCS8EncodedKeySpec(_))
    val keys = for (spec <- found.iterator; name <- Algorithms.iterator; key <- parse(name, spec)) yield key
    keys.nextOption().getOrElse(throw new InvalidKeySpecException(s"$path has no key that Java reads (PKCS#8)"))
  }

  private def parse(algorithm: String, spec: PKCS8EncodedKeySpec): Option[PrivateKey] =
    try Some(KeyFactory.getInstance(algorithm).generatePrivate(spec))
    catch { case _: InvalidKeySpecException => None }

  private def blocks(path: String, kind: String): Seq[Array[Byte]] =
    Block.findAllMatchIn(new String(Content.of(path), US_ASCII)).filter(_.group(1) == kind).toSeq.map { each =>
      try Base64.getMimeDecoder.decode(each.group(2))
      catch { case _: IllegalArgumentException => throw new CertificateException(s"$path is damaged") }
    }
}
